"""The routes by which operators see and change the engines: `/kvturn/v1/engines`.

Where clients need no key anybody who reaches the router may see the engines;
where they do, only an operator. To change them always takes an operator's key,
for whoever names an engine has the router send prompts there.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs

import msgspec

from kvturn_router.engines.engine import BOTH, DECODE, PREFILL
from kvturn_router.engines.fleet import OPERATOR, EngineView, Fleet, FleetFull
from kvturn_router.errors import TurnError, bad_field
from kvturn_router.front.http_wire import HttpAnswer, HttpRequest
from kvturn_router.request.body import given_string, parse
from kvturn_router.request.keys import ApiKeys, operator_of

ENGINES: Final = "/kvturn/v1/engines"
DRAIN: Final = "/kvturn/v1/engines/drain"

_ROLES: Final = (PREFILL, DECODE, BOTH)
_URLS_SHOWN_MAX: Final = 16
_JSON: Final = ((b"content-type", b"application/json"),)


class EnginesFront:
    """Serves `ENGINES` and `DRAIN`.

    `admin_keys` are operators', None for none: then nothing can be changed.
    `anyone_may_see` says that clients need no key. `one_of_several` says that
    there are other processes on the same port, which a change would not reach.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        admin_keys: ApiKeys | None,
        anyone_may_see: bool,
        one_of_several: bool,
    ) -> None:
        self._fleet = fleet
        self._admin_keys = admin_keys
        self._anyone_may_see = anyone_may_see
        self._one_of_several = one_of_several

    def serve(self, answer: HttpAnswer, request: HttpRequest, path: str, query: str) -> None:
        """Answers a request for one of the paths. Raises TurnError."""
        method = request.method
        if path == DRAIN and method == "POST":
            self._authorize(request)
            body = self._drain(query)
        elif path == ENGINES and method == "POST":
            self._authorize(request)
            body = self._add(request.body)
        elif path == ENGINES and method == "DELETE":
            self._authorize(request)
            body = self._remove(query)
        elif path == ENGINES and method in ("GET", "HEAD"):
            if not self._anyone_may_see:
                operator_of(self._admin_keys, request.headers)
            body = {"engines": [view._asdict() for view in self._fleet.views()]}
        else:
            allowed = "POST" if path == DRAIN else "GET or POST or DELETE"
            raise TurnError(405, f"Use {allowed} here.", reason="METHOD_NOT_ALLOWED")
        answer.whole(200, _JSON, msgspec.json.encode(body))

    def _authorize(self, request: HttpRequest) -> None:
        operator_of(self._admin_keys, request.headers)
        if self._one_of_several:
            raise TurnError(
                409,
                "Engines of a router with several --workers are changed through flags or their "
                "sessions with the lease service: this request reaches one worker only.",
                reason="SEVERAL_WORKERS",
            )

    def _add(self, body: bytes) -> Mapping[str, object]:
        members = parse(body)
        for name in members:
            if name not in ("url", "role"):
                raise bad_field(name, "Only `url` and `role` can be given.")
        url, role = given_string(members, "url"), given_string(members, "role")
        if url is None:
            raise bad_field("url", "url is required.")
        if role not in _ROLES:
            raise bad_field("role", f"role must be one of {', '.join(_ROLES)}.")
        try:
            self._fleet.add(url, role, OPERATOR)
        except ValueError as error:
            raise bad_field("url", f"url {error}.") from None
        except FleetFull as error:
            raise TurnError(409, f"It {error}.", reason="ENGINES_EXHAUSTED") from None
        return self._view(url)

    def _remove(self, query: str) -> Mapping[str, object]:
        url = _argument(query, "url")
        self._require(url)
        if not self._fleet.remove(url, OPERATOR):
            raise TurnError(
                409,
                "No operator has named this engine: it is there by flags or by its own session. "
                f"To give it no turns, use POST {DRAIN}.",
                reason="NOT_OPERATORS",
            )
        return self._view(url) if self._fleet.is_named(url) else {"url": url, "named_by": []}

    def _drain(self, query: str) -> Mapping[str, object]:
        url, draining = _argument(query, "url"), _argument(query, "draining")
        if draining not in ("true", "false"):
            raise bad_field("draining", "draining must be true or false.")
        self._require(url)
        self._fleet.drain(url, draining == "true")
        return self._view(url)

    def _require(self, url: str) -> None:
        if not self._fleet.is_named(url):
            urls = [view.url for view in self._fleet.views()]
            there = ", ".join(urls[:_URLS_SHOWN_MAX]) + ", ..." * (len(urls) > _URLS_SHOWN_MAX)
            raise TurnError(
                404,
                f"There is no engine at that url; there are: {there or 'none'}.",
                reason="ENGINE_NOT_FOUND",
            )

    def _view(self, url: str) -> Mapping[str, object]:
        view: EngineView = self._fleet.view(url)
        return view._asdict()


def _argument(query: str, name: str) -> str:
    try:
        values = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise TurnError(400, "The path cannot be read.", reason="PATH_INVALID") from None
    given = values.get(name, [])
    if len(given) != 1 or not given[0]:
        raise bad_field(name, f"The query must say {name} once.")
    return given[0]
