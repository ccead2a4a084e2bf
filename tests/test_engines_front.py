"""What operators see of the engines over HTTP, and how they change them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvturn.address import EngineAddress
from kvturn.keys import watched_keys
from kvturn_router.engines.engine import Engine
from kvturn_router.engines.fleet import FLAGS, AnnouncedEngine, Fleet
from kvturn_router.engines.health import Health
from kvturn_router.errors import TurnError
from kvturn_router.front.engines_front import DRAIN, ENGINES, EnginesFront
from kvturn_router.front.http_wire import HttpRequest
from kvturn_router.request.keys import ApiKeys

KEY = "operator-0123456789"
A, B = "http://a:1", "http://b:2"


class Answer:
    """Takes the answer that a front gives."""

    def whole(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.json = json.loads(body)


class Operator:
    """Asks a front of its own, with a fleet that flags, an operator and a session name."""

    def __init__(self, folder: Path, *, admin: bool = True, **settings: bool) -> None:
        def build(address: EngineAddress, number: int) -> Engine:
            health = Health(interval_ns=1, failures_max=1, faults_max=1, phase=0, now_ns=0)
            return Engine(address, health=health, connect_timeout_s=1)

        self.fleet = Fleet(build, lambda: 0)
        self.fleet.add(A, "prefill", FLAGS)
        self.fleet.announced([AnnouncedEngine("d1", "decode", "http://d:3", False)])
        file = folder / "keys"
        file.write_text(KEY)
        self._front = EnginesFront(
            self.fleet,
            admin_keys=ApiKeys(watched_keys("--admin-keys-file", file)) if admin else None,
            **({"anyone_may_see": False, "one_of_several": False} | settings),
        )

    def ask(
        self, method: str, target: str = ENGINES, body: Any = None, key: str | None = KEY
    ) -> Answer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        data = b"" if body is None else json.dumps(body).encode()
        path, _, query = target.partition("?")
        answer = Answer()
        request = HttpRequest(method, target.encode(), headers, data, True, False)
        self._front.serve(answer, request, path, query)  # type: ignore[arg-type]
        return answer

    def refused(self, *asked: Any, **more: Any) -> TurnError:
        with pytest.raises(TurnError) as refusal:
            self.ask(*asked, **more)
        return refusal.value


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_engines_are_listed_with_those_who_name_them(operator: Operator):
    """By URL, with role, state and load."""
    operator.ask("POST", body={"url": "http://d:3", "role": "decode"})
    engines = operator.ask("GET").json["engines"]
    assert [(one["url"], one["role"], one["named_by"]) for one in engines] == [
        (A, "prefill", ["flags"]),
        ("http://d:3", "decode", ["operator", "session:d1"]),
    ]
    assert engines[0] | {"url": "", "role": "", "named_by": []} == {
        "url": "",
        "role": "",
        "named_by": [],
        "usable": False,
        "reason": "it has not been asked yet",
        "draining": False,
        "in_flight": 0,
        "served": 0,
    }


def test_an_engine_is_added_given_another_role_and_removed(operator: Operator):
    """Each answer has the engine as it is then."""
    assert operator.ask("POST", body={"url": B, "role": "prefill"}).json["role"] == "prefill"
    assert operator.ask("POST", body={"url": B, "role": "decode"}).json["role"] == "decode"
    assert [engine.url for engine in operator.fleet.decodes] == ["http://d:3", B]
    assert len(operator.ask("GET").json["engines"]) == 3
    gone = operator.ask("DELETE", f"{ENGINES}?url={B}")
    assert gone.json == {"url": B, "named_by": []}
    assert [engine.url for engine in operator.fleet.decodes] == ["http://d:3"]


def test_what_flags_or_a_session_name_stays_and_can_be_drained(operator: Operator):
    """To remove it is refused with the way to go."""
    refusal = operator.refused("DELETE", f"{ENGINES}?url={A}")
    assert (refusal.status, refusal.reason) == (409, "NOT_OPERATORS")
    assert DRAIN in refusal.message
    assert operator.ask("POST", f"{DRAIN}?url={A}&draining=true").json["draining"]
    assert not operator.ask("POST", f"{DRAIN}?url={A}&draining=false").json["draining"]


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "param"),
    [
        ("POST", ENGINES, None, 400, None),
        ("POST", ENGINES, [], 400, None),
        ("POST", ENGINES, {"role": "decode"}, 400, "url"),
        ("POST", ENGINES, {"url": B}, 400, "role"),
        ("POST", ENGINES, {"url": B, "role": "boss"}, 400, "role"),
        ("POST", ENGINES, {"url": B, "role": 1}, 400, "role"),
        ("POST", ENGINES, {"url": B, "role": "decode", "x": 1}, 400, "x"),
        ("POST", ENGINES, {"url": "file:///etc", "role": "decode"}, 400, "url"),
        ("POST", ENGINES, {"url": "http://b:2/path", "role": "decode"}, 400, "url"),
        ("DELETE", ENGINES, None, 400, "url"),
        ("DELETE", f"{ENGINES}?url=", None, 400, "url"),
        ("DELETE", f"{ENGINES}?url={A}&url={B}", None, 400, "url"),
        ("DELETE", f"{ENGINES}?url={B}", None, 404, None),
        ("DELETE", f"{ENGINES}?url=%ff", None, 400, None),
        ("POST", f"{DRAIN}?url={A}", None, 400, "draining"),
        ("POST", f"{DRAIN}?url={A}&draining=1", None, 400, "draining"),
        ("POST", f"{DRAIN}?url={B}&draining=true", None, 404, None),
        ("GET", DRAIN, None, 405, None),
        ("PUT", ENGINES, None, 405, None),
    ],
)
def test_what_is_wrong_is_refused_by_name(operator, method, target, body, status, param):
    """And changes nothing."""
    before = operator.ask("GET").json
    refusal = operator.refused(method, target, body)
    assert (refusal.status, refusal.param) == (status, param)
    assert operator.ask("GET").json == before


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", ENGINES, {"url": B, "role": "decode"}),
        ("DELETE", f"{ENGINES}?url={A}", None),
        ("POST", f"{DRAIN}?url={A}&draining=true", None),
    ],
)
def test_only_operators_change_engines(tmp_path, method, target, body):
    """No key and a wrong one: 401. No keys set up: 403 with the flag that does it."""
    operator = Operator(tmp_path, anyone_may_see=True)
    assert operator.refused(method, target, body, key=None).status == 401
    wrong = operator.refused(method, target, body, key="another-0123456789")
    assert wrong.status == 401
    assert wrong.message.startswith("This takes an operator's key, of --admin-keys-file. ")
    nobody = Operator(tmp_path, admin=False, anyone_may_see=True)
    refusal = nobody.refused(method, target, body)
    assert refusal.status == 403
    assert "--admin-keys-file" in refusal.message
    assert len(nobody.ask("GET", key=None).json["engines"]) == 2


def test_where_clients_need_keys_only_operators_see_the_engines(operator: Operator):
    """Addresses of engines are no business of clients."""
    assert operator.refused("GET", key=None).status == 401
    assert operator.ask("GET").status == 200


def test_one_of_several_workers_changes_nothing(tmp_path):
    """The others would not hear of it."""
    operator = Operator(tmp_path, one_of_several=True)
    refusal = operator.refused("POST", ENGINES, {"url": B, "role": "decode"})
    assert (refusal.status, refusal.reason) == (409, "SEVERAL_WORKERS")
    assert len(operator.ask("GET").json["engines"]) == 2
