"""The Responses API: what each leg is sent, and how a response is found again."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from response_engine import RESPONSES, answer_of, offer_responses, output_of
from response_engine import events as response_events
from router_harness import FakeLease, Rig, router
from stub_engine import StubEngine

from kvturn_router.errors import TurnError
from kvturn_router.request.body import parse
from kvturn_router.request.responses import (
    response_id,
    response_name,
    responses_decode_parts,
    responses_need_decode_alone,
    responses_prefill_parts,
)

UNIQUE = "0123456789abcdef01234567"
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("members", "alone"),
    [
        ({"input": "x"}, False),
        ({"tools": [FUNCTION, {"type": "custom", "name": "c"}]}, False),
        ({"tools": [], "background": False, "truncation": "disabled"}, False),
        ({"tools": None, "previous_response_id": None, "max_output_tokens": None}, False),
        ({"previous_response_id": "resp_1"}, False),
        ({"background": True}, True),
        ({"truncation": "auto"}, True),
        ({"max_output_tokens": 0}, True),
        ({"tools": [FUNCTION, {"type": "code_interpreter"}]}, True),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, True),
        ({"tools": ["x"]}, True),
        ({"tools": [{"type": 1}]}, True),
    ],
)
def test_what_cannot_be_split_is_recognised(members, alone):
    """Background work, the engine's own tools, a cut prompt."""
    assert responses_need_decode_alone(parse(json.dumps(members).encode())) is alone


@pytest.mark.parametrize(
    ("member", "value"),
    [("background", "yes"), ("tools", {}), ("max_output_tokens", "1")],
)
def test_a_member_of_the_wrong_kind_is_refused_by_name(member, value):
    """What the router itself reads must be of the right kind."""
    with pytest.raises(TurnError) as refused:
        responses_need_decode_alone(parse(json.dumps({member: value}).encode()))
    assert refused.value.param == member


def test_the_legs_of_a_response():
    """Prefill makes one token and keeps nothing; decode gets all the client sent, and the id."""
    text = (
        b'{"model":"m","input":[{"role": "user"}],"stream":true,"store":true,"background":false,'
        b'"max_output_tokens":500,"stop":["x"],"instructions":"\\u00e9","request_id":"mine",'
        b'"kv_transfer_params":{"remote_host":"evil"},"conversation_id":"c"}'
    )
    members = parse(text)
    assert b"".join(responses_prefill_parts(members, b"{}")) == (
        b'{"model":"m","input":[{"role": "user"}],"instructions":"\\u00e9",'
        b'"stream":false,"store":false,"max_output_tokens":1,"kv_transfer_params":{}}'
    )
    assert b"".join(responses_decode_parts(members, b"{}", "resp_1")) == (
        b'{"model":"m","input":[{"role": "user"}],"stream":true,"store":true,"background":false,'
        b'"max_output_tokens":500,"stop":["x"],"instructions":"\\u00e9",'
        b'"request_id":"resp_1","kv_transfer_params":{}}'
    )


@pytest.mark.parametrize("conversation_id", ["c", "conv-1/\u00e9 \U0001f600", "x" * 256])
def test_a_response_id_leads_back_to_its_engine_and_conversation(conversation_id):
    """For the tenant that got it; for another it is as if it had never been."""
    made = response_id("t", conversation_id, "d1:8100", UNIQUE)
    assert made.isascii()
    assert " " not in made
    name = response_name(made, "t")
    assert name is not None
    assert name.conversation_id == conversation_id
    assert name.is_held_by("d1:8100")
    assert not name.is_held_by("d2:8100")
    assert response_name(made, "other") is None
    assert response_name(made, "") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "resp_1",
        "resp_" + "0" * 48 + "Yw",
        response_id("t", "c", "d:1", UNIQUE) + "A",
        response_id("t", "c", "d:1", UNIQUE)[:-1],
        "resp_" + "0" * 48 + "\u00e9" * 4,
    ],
)
def test_an_id_that_the_router_did_not_make_is_not_known(text):
    """Made up, cut, or longer than it was."""
    assert response_name(text, "t") is None


def asking(**members: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "input": "What is the weather in Paris?",
        "max_output_tokens": 50,
    } | members


def latest_response_of(engine: StubEngine) -> dict[str, Any]:
    """Returns the latest body of a response that an engine was asked for."""
    return [seen.json for seen in engine.seen if seen.path == RESPONSES][-1]


@contextlib.asynccontextmanager
async def offering(decodes: int = 1, lease: FakeLease | None = None) -> AsyncIterator[Rig]:
    """A router whose engines offer the Responses API."""
    async with router(decodes=decodes, lease=lease) as rig:
        for engine in (*rig.prefills, *rig.decodes):
            offer_responses(engine)
        yield rig


async def test_a_response_goes_through_prefill_and_then_decode():
    """Prefill makes one token and keeps nothing; decode gets all, and a name of the router's."""
    async with offering() as rig:
        rig.prefill.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 30}
        answer = await rig.post(asking(store=True, conversation_id="c1"), RESPONSES)
        assert answer.status == 200
        [prefill], [decode] = (
            [seen.json for seen in engine.seen if seen.path == RESPONSES]
            for engine in (rig.prefill, rig.decode)
        )
        kvturn = {"do_remote_decode": True, "do_remote_prefill": False}
        assert prefill == asking(
            stream=False, store=False, max_output_tokens=1, kv_transfer_params=kvturn
        )
        name = response_name(decode.pop("request_id"), "")
        assert name is not None
        assert name.conversation_id == "c1"
        assert decode == asking(store=True, kv_transfer_params=rig.prefill.handle)
        assert answer.json["id"] == name.response_id
        assert answer.json["usage"]["input_tokens_details"] == {"cached_tokens": 30}
        assert answer.headers["x-kvturn-reused-tokens"] == "30"


async def test_a_streamed_response_reaches_the_client_as_decode_sent_it():
    """Every event, its name and its spacing; only cached_tokens says what nobody computed."""
    async with offering() as rig:
        rig.prefill.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 30}
        answer = await rig.post(asking(stream=True), RESPONSES)
        [sent] = [seen.json for seen in rig.decode.seen if seen.path == RESPONSES]
        made = answer_of(sent["request_id"], sent, output_of(sent))
        events = b"".join(response_events(made))
        assert events.count(b'"cached_tokens": 48') == 1
        assert answer.body == events.replace(b'"cached_tokens": 48', b'"cached_tokens": 30')
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_what_goes_on_with_a_response_goes_to_the_engine_that_keeps_it():
    """It alone has the history, so there is no prefill; the conversation is the first one's."""
    async with offering(decodes=3) as rig:
        first = await rig.post(asking(), RESPONSES)
        conversation = first.headers["x-kvturn-conversation"]
        [holder] = [one for one in rig.decodes if any(s.path == RESPONSES for s in one.seen)]
        prefills = len(rig.prefill.seen)
        latest = first.json["id"]
        for _ in range(4):
            body = asking(input="And then?", previous_response_id=latest)
            answer = await rig.post(body, RESPONSES)
            assert answer.status == 200
            assert answer.headers["x-kvturn-conversation"] == conversation
            assert answer.verdict == "not_offered"
            assert answer.json["previous_response_id"] == latest
            latest = answer.json["id"]
        assert not [seen for seen in rig.prefill.seen[prefills:] if seen.path == RESPONSES]
        turns = [seen for one in rig.decodes for seen in one.seen if seen.path == RESPONSES]
        assert [seen for seen in holder.seen if seen.path == RESPONSES] == turns
        assert len(turns) == 5
        # Read again and cancelled, it is asked of the same engine.
        got = await rig.ask("GET", f"{RESPONSES}/{latest}?stream=false")
        assert got.json["id"] == latest
        assert f"{RESPONSES}/{latest}?stream=false" in [seen.path for seen in holder.seen]
        cancelled = await rig.ask("POST", f"{RESPONSES}/{latest}/cancel", b"")
        assert cancelled.status == 400
        assert "synchronous" in cancelled.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_goes_on_with_a_held_response_is_a_local_turn(stream):
    """Its engine holds the lease: the turn is told as its, and is retained for the next one.

    Without a lease it is served there all the same; nothing is retained of one without reuse.
    """
    async with offering(lease=FakeLease(), decodes=3) as rig:
        first = await rig.post(asking(), RESPONSES)
        conversation = first.headers["x-kvturn-conversation"]
        [holder] = [one for one in rig.decodes if any(s.path == RESPONSES for s in one.seen)]
        body = asking(input="And then?", previous_response_id=first.json["id"], stream=stream)
        [elsewhere, *_] = [one for one in rig.decodes if one is not holder]
        for lease_id, engine, verdict in (
            ("inc.1.1", holder, "local"),
            ("", holder, "no_lease"),
            ("inc.1.1", elsewhere, "no_lease"),
        ):
            rig.lease.lease_id, rig.lease.http_address = lease_id, engine.url
            rig.lease.verdict = "NO_LEASE"
            answer = await rig.post(body, RESPONSES)
            assert (answer.status, answer.verdict) == (200, verdict)
            named = latest_response_of(holder)["kv_transfer_params"]["kvturn"]
            assert named["conversation"] == conversation
            assert "lease_id" not in named
            assert "history" not in named
            assert rig.lease.begun[-1].reuse
            assert not rig.lease.begun[-1].points
        off = await rig.post(body, RESPONSES, headers=[("X-Kvturn-Reuse", "off")])
        assert off.verdict == "turned_off"
        assert "kv_transfer_params" not in latest_response_of(holder)
        own = body | {"truncation": "auto"}
        assert (await rig.post(own, RESPONSES)).verdict == "not_offered"
        wrong = await rig.post(body | {"previous_response_id": 1}, RESPONSES)
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "previous_response_id")


async def test_another_tenants_response_is_not_known():
    """Neither to go on with nor to read, and no engine is asked."""
    mine, other = ([("Authorization", f"Bearer {key}")] for key in ("a", "b"))
    async with offering() as rig:
        made = (await rig.post(asking(), RESPONSES, headers=mine)).json["id"]
        asked = len(rig.decode.seen)
        body = asking(previous_response_id=made)
        refused = await rig.post(body, RESPONSES, headers=other)
        assert (refused.status, refused.json["error"]["param"]) == (404, "previous_response_id")
        got = await rig.ask("GET", f"{RESPONSES}/{made}", headers=other)
        assert (got.status, got.json["error"]["param"]) == (404, "response_id")
        assert not [seen for seen in rig.decode.seen[asked:] if seen.path.startswith(RESPONSES)]
        assert (await rig.post(body, RESPONSES, headers=mine)).status == 200


async def test_an_error_repeats_the_beginning_of_what_the_client_wrote():
    """An unknown id, path or name may be as long as a body or a head: a page of it comes back."""
    long = "x" * 60_000
    async with offering() as rig:
        repeated = json.dumps(asking())[:-1] + f', "{long}": 1, "{long}": 2}}'
        answers = [
            await rig.post(asking(previous_response_id=long), RESPONSES),
            await rig.ask("GET", f"{RESPONSES}/{long}"),
            await rig.ask("GET", f"{RESPONSES}/resp_1/{long}"),
            await rig.ask("GET", f"/{long}"),
            await rig.post(repeated.encode(), RESPONSES),
            await rig.post({long: 1}, "/kvturn/v1/conversations/c/keepalive?model=m"),
        ]
        assert [answer.status for answer in answers] == [404, 404, 404, 404, 400, 400]
        for answer in answers:
            assert b"xxx..." in answer.body
            assert len(answer.body) < 2048


async def test_a_response_whose_engine_is_down_is_asked_of_no_other():
    """Another engine does not have it: 503, and the client may come back."""
    async with offering(decodes=2) as rig:
        made = (await rig.post(asking(), RESPONSES)).json["id"]
        [holder] = [one for one in rig.decodes if any(s.path == RESPONSES for s in one.seen)]
        await holder.stop()
        for _ in range(2):
            answer = await rig.post(asking(previous_response_id=made), RESPONSES)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await rig.post(asking(), RESPONSES)).status == 200


@pytest.mark.parametrize("why", ["draining", "full", "busy"])
async def test_a_response_is_asked_of_its_engine_whatever_that_has_to_do(why):
    """It drains, or has far more to do than the other: the other would not know the response."""
    async with offering(decodes=2) as rig:
        made = (await rig.post(asking(), RESPONSES)).json["id"]
        [holder] = [one for one in rig.decodes if any(s.path == RESPONSES for s in one.seen)]
        [engine] = [one for one in rig.server._fleet.decodes if one.url == holder.url]
        if why == "draining":
            rig.server._fleet.drain(holder.url, True)
        elif why == "full":
            engine._in_flight_max = 0
            engine.changed()
        else:
            for _ in range(100):
                engine.begin()
        asked = len(holder.seen)
        answer = await rig.post(asking(previous_response_id=made), RESPONSES)
        assert answer.status == 200
        assert [seen.path for seen in holder.seen[asked:] if seen.path == RESPONSES] == [RESPONSES]


async def test_engines_that_do_not_offer_the_api_say_so_themselves():
    """A 404 of the engine's own, as it is."""
    async with router() as rig:
        answer = await rig.post(asking(), RESPONSES)
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", RESPONSES, 405),
        ("GET", f"{RESPONSES}/resp_1", 404),
        ("POST", f"{RESPONSES}/resp_1/cancel", 404),
        ("GET", f"{RESPONSES}/resp_1/input_items", 404),
        ("DELETE", f"{RESPONSES}/resp_1", 405),
    ],
)
async def test_other_requests_about_responses_are_refused(method, path, status):
    """Unknown ids and methods, before any engine is asked."""
    async with offering() as rig:
        assert (await rig.ask(method, path)).status == status
        assert not [seen for seen in rig.decode.seen if seen.path.startswith(RESPONSES)]
