"""Turns that go wrong: engines that refuse, die, hang or go, and clients that leave."""

import asyncio
import json
import ssl
import time
from typing import cast

import pytest
from awake import within
from router_harness import FakeLease, router, turn_body
from stub_engine import CHAT, GUARD_S, Play, Reply, Seen, StubEngine, chunk, event

from kvturn_router.engines.engine_http import EnginePool, request_bytes
from kvturn_router.engines.fleet import FLAGS
from kvturn_router.request.responses import RESPONSES
from kvturn_router.turn.usage import StreamUsage

ERROR = b'{"error": {"message":"too long","type":"BadRequestError","param":null,"code":400} }'


def refusing(status: int, *headers: tuple[str, str]) -> Play:
    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(ERROR, status, *headers)

    return play


async def aborting(seen: Seen, reply: Reply) -> None:
    reply.abort()


async def silent(seen: Seen, reply: Reply) -> None:
    await seen.gone.wait()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_refusal_reaches_the_client_as_it_is(leg, status):
    """Status, body, type and Retry-After; one call of the leg, and the engine stays in."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        engine.script(CHAT, refusing(status, ("Retry-After", "7"), ("X-Internal", "1")))
        answer = await rig.post(turn_body(stream=True))
        assert (answer.status, answer.body) == (status, ERROR)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["retry-after"] == "7"
        assert "x-internal" not in answer.headers
        asked = [seen for seen in rig.decode.turns if seen.json["stream"]]
        assert len(rig.prefill.turns) == 1
        assert len(asked) == (1 if leg == "decode" else 0)
        assert (await rig.ask("GET", "/ready")).status == 200


async def test_a_client_error_does_not_take_an_engine_out():
    """Twenty bad prompts in a row: each is told, and the next good one is served."""
    async with router() as rig:
        rig.prefill.script(CHAT, refusing(400))
        statuses = [(await rig.post(turn_body())).status for _ in range(20)]
        assert statuses == [400] * 20
        assert len(rig.prefill.turns) == 20
        rig.prefill.script(CHAT, rig.prefill.prefill)
        assert (await rig.post(turn_body())).status == 200


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_that_dies_before_it_answers_is_a_502(leg):
    """The connection ends without a byte, on a new one too: an error in OpenAI's shape."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        engine.script(CHAT, aborting)
        answer = await rig.post(turn_body())
        assert answer.status == 502
        assert leg in answer.json["error"]["message"]
        assert len(engine.turns) <= 2


async def dies_after_its_head(seen: Seen, reply: Reply) -> None:
    """As an engine does that is killed while it computes the first token of a stream."""
    del seen
    await reply.begin_stream()
    reply.abort()


async def test_a_decode_that_dies_after_its_head_is_left_for_another():
    """Nothing of an answer had come, so the client sees the other one's and no trace of it."""
    async with router(decodes=2) as rig:
        rig.decodes[0].script(CHAT, dies_after_its_head)
        answer = await rig.post(turn_body(stream=True))
        assert (answer.status, answer.whole) == (200, True)
        assert b"[DONE]" in answer.body
        assert b"error" not in answer.body
        (lost,), (again,) = rig.decodes[0].turns, rig.decodes[1].turns
        assert "kv_transfer_params" in lost.json
        # What prefill held may have been fetched, and can be only once.
        assert "kv_transfer_params" not in again.json


async def test_the_only_decode_that_dies_after_its_head_is_a_502():
    """A status and an error in OpenAI's shape, not a stream that ends in one."""
    async with router() as rig:
        rig.decode.script(CHAT, dies_after_its_head)
        answer = await rig.post(turn_body(stream=True))
        assert answer.status == 502
        assert "decode" in answer.json["error"]["message"]


async def test_a_stream_without_an_end_that_ends_before_it_began_is_a_502():
    """Without a length or chunks the connection's end could be the answer's."""

    async def play(seen: Seen, reply: Reply) -> None:
        del seen
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        reply.close()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        assert (await rig.post(turn_body(stream=True))).status == 502


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_that_hangs_is_a_504_and_delays_no_one_else(leg):
    """One leg hangs; meanwhile other turns are served; in the end nothing is in flight."""
    flags = ("--prefill-timeout-s=3", "--decode-timeout-s=3")
    async with router(*flags) as rig:
        engine: StubEngine = getattr(rig, leg)
        usual = engine.prefill if leg == "prefill" else engine.decode
        engine.script(CHAT, silent)
        stuck = asyncio.create_task(rig.post(turn_body()))
        await engine.turn(1)
        engine.script(CHAT, usual)
        assert (await rig.post(turn_body())).status == 200
        assert not stuck.done()
        answer = await stuck
        assert answer.status == 504
        assert rig.server._forwarder.in_flight == 0
        assert [engine.in_flight for engine in rig.server._fleet.prefills] == [0]
        assert [engine.in_flight for engine in rig.server._fleet.decodes] == [0]


@pytest.mark.parametrize("cut", [b"", b'data: {"choices":[{"del'])
async def test_a_stream_that_breaks_off_ends_with_an_error_and_nothing_invented(cut):
    """Decode dies in the middle: an error event, no [DONE], and a body that is not whole."""
    first = event(chunk({"content": "The"}))

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(first + cut)
        reply.abort()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(stream=True))
        assert answer.status == 200
        assert not answer.whole
        assert answer.body.startswith(first + cut)
        assert "[DONE]" not in answer.events
        assert not any('"finish_reason":"' in text for text in answer.events)
        error = json.loads(answer.events[-1])["error"]
        assert error["code"] == 502
        assert answer.body.endswith(b"\n\n")


UNFRAMED = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n%b"


def unframed(kind: bytes, body: bytes) -> Play:
    """An answer that ends with its connection, as some proxies before an engine send it."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.raw(UNFRAMED % (kind, body))
        reply.close()

    return play


async def test_a_stream_without_framing_is_whole_only_if_its_last_event_came():
    """Its connection is closed in order: nothing but the events tells whether it was cut."""
    first = event(chunk({"content": "The [DONE]"}))
    ends = {CHAT: b"data: [DONE]", RESPONSES: b"event: response.completed\ndata: {}"}
    async with router() as rig:
        for path, last in ends.items():
            rig.prefill.script(path, rig.prefill.prefill)
            for rest in (last + b"\n\n", last, b""):
                rig.decode.script(path, unframed(b"text/event-stream", first + rest))
                answer = await rig.post(turn_body(stream=True, input="Hi"), path)
                assert (answer.status, answer.whole) == (200, bool(rest))
                assert answer.body.startswith(first + rest)
                if not rest:
                    assert json.loads(answer.events[-1])["error"]["code"] == 502


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_answer_without_framing_that_was_cut_is_a_502(leg):
    """Half a JSON object is none, though its connection was closed in order; a whole one is one."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        usual = (
            engine.prefill_answer()
            if leg == "prefill"
            else engine.whole_answer(Seen("POST", CHAT, [], b"{}"))
        )
        whole = json.dumps(usual).encode()
        engine.script(CHAT, unframed(b"application/json", whole))
        assert (await rig.post(turn_body())).status == 200
        engine.script(CHAT, unframed(b"application/json", whole[:-20]))
        answer = await rig.post(turn_body())
        assert answer.status == 502
        assert leg in answer.json["error"]["message"]


async def test_a_stream_that_falls_silent_ends_with_an_error():
    """Nothing comes for the decode timeout: the client is told."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    async with router("--decode-timeout-s=0.3") as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(stream=True))
        assert json.loads(answer.events[-1])["error"]["code"] == 504


async def test_an_engines_own_error_event_passes_as_it_is():
    """The engine ends its stream itself with an error and [DONE]."""
    sent = [event({"error": {"message": "boom", "code": 500}})]

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(sent[0])
        await reply.end_stream()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        answer = await rig.post(turn_body(stream=True))
        assert answer.body == sent[0] + b"data: [DONE]\n\n"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_the_leg_at_once(leg):
    """The client closes while the leg is out: the engine's connection ends."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        engine.script(CHAT, silent)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        seen = await engine.turn(1)
        client.close()
        async with within(2):
            await seen.gone.wait()
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        if leg == "prefill":
            assert rig.decode.turns == []


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it():
    """Decode streams; the client goes after the first event."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        assert await client.piece() is not None
        client.close()
        async with within(2):
            await rig.decode.turns[0].gone.wait()


@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
async def test_two_hundred_clients_that_leave_end_two_hundred_legs(phase):
    """All at once, in each phase of a turn: the engine sees every one of them go within 2 s."""

    async def begun(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    async with router() as rig:
        engine = rig.prefill if phase == "prefill" else rig.decode
        engine.script(CHAT, begun if phase == "stream" else silent)
        clients = [await rig.client() for _ in range(200)]
        body = json.dumps(turn_body(stream=True)).encode()
        for client in clients:
            await client.send("POST", CHAT, body)
        await engine.turn(200)
        if phase == "stream":
            assert [await client.piece() for client in clients if await client.head()]
        for client in clients:
            client.close()
        async with within(2):
            await asyncio.gather(*(seen.gone.wait() for seen in engine.turns))
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        assert [one.in_flight for one in rig.server._fleet] == [0, 0]
        assert len(engine.turns) == 200
        assert (phase == "prefill") == (rig.decode.turns == [])


async def test_what_prefill_holds_is_released_when_the_client_leaves_between_the_legs():
    """Decode could not be reached before the client went: decode fetches the KV, for one token."""
    async with router() as rig:
        pool = rig.server._fleet.holder(rig.decode.url).pool
        connecting = 0
        send = pool.send

        async def slow_send(request, **kwargs):
            nonlocal connecting
            if request.startswith(b"POST"):
                connecting += 1
                await left.wait()
            return await send(request, **kwargs)

        left = asyncio.Event()
        pool.send = slow_send  # type: ignore[method-assign]
        clients = [await rig.client() for _ in range(400)]
        for client in clients:
            await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await rig.until(lambda: connecting == 400)
        for client in clients:
            client.close()
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        left.set()
        await rig.decode.turn(400)
        for seen in rig.decode.turns:
            assert seen.json["max_tokens"] == 1
            assert seen.json["stream"] is False
            assert seen.json["kv_transfer_params"] == rig.prefill.handle


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_what_prefill_holds_is_released_when_decode_refuses(status):
    """A limit that only decode sees, or no room, for 200 at once: each client is told, and decode
    fetches the KV of each."""
    all_asked = asyncio.Barrier(200)

    async def decode(seen: Seen, reply: Reply) -> None:
        if seen.json["max_tokens"] == 1:
            await rig.decode.decode(seen, reply)
        else:
            await all_asked.wait()
            await reply.whole(ERROR, status)

    async with router(lease=FakeLease()) as rig:
        rig.prefill.number_handles()
        rig.decode.script(CHAT, decode)
        bodies = [
            turn_body(stream=True, messages=[{"role": "user", "content": f"{number}"}])
            for number in range(200)
        ]
        answers = await asyncio.gather(*map(rig.post, bodies))
        assert {answer.status for answer in answers} == {status}
        await rig.decode.turn(400)
        asked = [seen.json for seen in rig.decode.turns]
        refused, released = (
            {
                one["kv_transfer_params"]["remote_request_id"]: one["messages"]
                for one in asked
                if one["max_tokens"] == limit
            }
            for limit in (16, 1)
        )
        assert refused == released
        assert len(released) == 200
        for release in (one for one in asked if one["max_tokens"] == 1):
            assert release["stream"] is False
            # Nothing of it is retained: the handle, and no conversation.
            handle = release["kv_transfer_params"]
            assert handle | {"remote_request_id": "chatcmpl-p"} == rig.prefill.handle


async def test_what_decode_may_have_fetched_is_not_fetched_again():
    """It fails in the midst of its work: what prefill held may be another's by now."""
    async with router() as rig:
        rig.decode.script(CHAT, refusing(500))
        assert (await rig.post(turn_body())).status == 500
        rig.decode.script(CHAT, rig.decode.decode)
        assert (await rig.post(turn_body(max_tokens=7))).status == 200
        assert [seen.json["max_tokens"] for seen in rig.decode.turns] == [16, 7]


async def test_what_a_decode_that_is_gone_did_not_fetch_another_does():
    """It refuses connections, the other one is full, and the client leaves the line."""
    async with router("--max-inflight-per-engine=1", "--health-interval-s=60", decodes=2) as rig:
        rig.decodes[0].script(CHAT, silent)
        rig.decodes[1].script(CHAT, silent)
        first = await rig.client()
        await first.send("POST", CHAT, json.dumps(turn_body()).encode())
        await rig.until(lambda: rig.decodes[0].turns or rig.decodes[1].turns)
        full, gone = rig.decodes if rig.decodes[0].turns else rig.decodes[::-1]
        await gone.stop()
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body()).encode())
        await rig.until(lambda: len(rig.server._forwarder.admission.room) == 1)
        client.close()
        release = await full.turn(2)
        assert release.json["max_tokens"] == 1
        assert release.json["kv_transfer_params"] == rig.prefill.handle


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_turn_whose_engine_is_gone_waits_for_another_that_is_full(leg):
    """Each has room for one: the turn whose engine refuses connections gets the other in turn."""
    done = asyncio.Event()
    async with router(
        "--max-inflight-per-engine=1", "--health-interval-s=60", prefills=2, decodes=2
    ) as rig:
        engines = rig.prefills if leg == "prefill" else rig.decodes

        async def slow(seen: Seen, reply: Reply) -> None:
            await done.wait()
            await (rig.prefill.prefill if leg == "prefill" else rig.decode.decode)(seen, reply)

        for engine in engines:
            engine.script(CHAT, slow)
        first = asyncio.create_task(rig.post(turn_body()))
        await rig.until(lambda: engines[0].turns or engines[1].turns)
        await (engines[1] if engines[0].turns else engines[0]).stop()
        second = asyncio.create_task(rig.post(turn_body()))
        await rig.until(lambda: len(rig.server._forwarder.admission.room) == 1)
        done.set()
        answers = await asyncio.gather(first, second)
        assert [answer.status for answer in answers] == [200, 200]
        # The one whose prefill is done goes on with what prefill holds.
        assert all("kv_transfer_params" in x.json for one in rig.decodes for x in one.turns)
        assert not any(engine.in_flight for engine in rig.server._fleet)


@pytest.mark.parametrize("lease_id", ["", "lease-1"])
async def test_a_turn_whose_prefill_died_with_it_waits_for_another_that_is_full(lease_id):
    """The other one has room for one and is busy; a lease that may have been read is left out."""
    done = asyncio.Event()
    lease = FakeLease()
    async with router("--max-inflight-per-engine=1", prefills=2, decodes=2, lease=lease) as rig:

        async def slow(seen: Seen, reply: Reply) -> None:
            await done.wait()
            await rig.prefill.prefill(seen, reply)

        for engine in rig.prefills:
            engine.script(CHAT, slow)
        first = asyncio.create_task(rig.post(turn_body()))
        await rig.until(lambda: rig.prefills[0].turns or rig.prefills[1].turns)
        full, dies = rig.prefills if rig.prefills[0].turns else rig.prefills[::-1]
        dies.script(CHAT, aborting)
        lease.lease_id = lease_id
        second = asyncio.create_task(rig.post(turn_body()))
        await rig.until(lambda: len(rig.server._forwarder.admission.room) == 1)
        done.set()
        answers = await asyncio.gather(first, second)
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[1].verdict == ("read_failed" if lease_id else "first_turn")
        # It is healthy and idle, but is not given what it died with; only what is lost on a kept
        # connection is sent once more.
        assert len(dies.turns) <= 2
        asked = (dies.turns[0], full.turns[1])
        told = [seen.json["kv_transfer_params"]["kvturn"] for seen in asked]
        assert [one.get("lease_id", "") for one in told] == [lease_id, ""]
        assert not any(engine.in_flight for engine in rig.server._fleet)


async def test_a_turn_with_which_two_engines_die_is_not_given_to_a_third():
    """Each dies in turn while the others are full: a request that ends engines ends no third."""
    async with router("--max-inflight-per-engine=1", prefills=3, decodes=3) as rig:
        for engine in rig.prefills:
            engine.script(CHAT, aborting)
        assert (await rig.post(turn_body())).status == 502
        assert sum(bool(engine.turns) for engine in rig.prefills) == 2


async def test_a_fault_of_the_router_ends_the_turn_it_happens_in(monkeypatch):
    """The last bytes of a stream cannot be looked at: the client is told, and nobody waits."""

    def feed(self: object, data: bytes) -> bytes:
        if b"[DONE]" in data:
            raise RuntimeError("told in the log")
        return data

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await begun.wait()
        await reply.end_stream()

    begun = asyncio.Event()
    monkeypatch.setattr(StreamUsage, "feed", feed)
    async with router() as rig:
        rig.decode.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
        await client.head()
        assert await client.piece() is not None
        begun.set()
        last = await client.piece()
        assert last is not None
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 502
        assert not any(engine.in_flight for engine in rig.server._fleet)


_DEEP = b'{"choices":[],"usage":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_nested_too_deeply_to_be_read_is_passed_on(leg, stream):
    """Nothing of it is known; the turn is served all the same."""

    async def play(seen: Seen, reply: Reply) -> None:
        if seen.json["stream"]:
            await reply.begin_stream()
            await reply.send(b"data: " + _DEEP + b"\n\n")
            await reply.end_stream()
        else:
            await reply.whole(_DEEP)

    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        engine.script(CHAT, play)
        answer = await rig.post(turn_body(stream=stream))
        assert (answer.status, answer.whole) == (200, True)
        assert (_DEEP in answer.body) is (leg == "decode")


async def test_an_engine_that_refuses_by_the_head_alone_spoils_no_later_request():
    """It answers before it has read the body, and never reads it: the connection is not kept."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\n{}")
            await over.wait()
        else:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with router(f"--prefill={url}", prefills=1) as rig:
        rig.server._fleet.remove(rig.prefill.url, FLAGS)
        assert (await rig.post(turn_body(user="x" * (20 << 20)))).status == 413
        async with within(10):
            assert (await rig.post(turn_body())).status == 413
    over.set()
    server.close()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_connection_closed_while_idle_never_shows(leg):
    """The engine closes an idle connection just as the next request is on it: one more try."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)
        usual = engine.prefill if leg == "prefill" else engine.decode
        assert (await rig.post(turn_body())).status == 200

        async def close_once(seen: Seen, reply: Reply) -> None:
            engine.script(CHAT, usual)
            reply.close()

        engine.script(CHAT, close_once)
        answer = await rig.post(turn_body())
        assert answer.status == 200
        first, lost, again = engine.turns
        assert lost.header("x-request-id") != again.header("x-request-id")
        if leg == "decode":
            # The KV may have been fetched with the lost request, and can be only once.
            assert "kv_transfer_params" in lost.json
            assert "kv_transfer_params" not in again.json
            # Decode had it all in its own cache, but prefill had computed it.
            assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        else:
            assert again.json == first.json


async def test_an_engine_that_refuses_connections_is_left_for_another():
    """Prefill 0 and decode 0 are killed: turns are served by the others, without an error."""
    async with router(prefills=2, decodes=2) as rig:
        await rig.prefills[0].stop()
        await rig.decodes[0].stop()
        answers = [await rig.post(turn_body()) for _ in range(5)]
        assert [answer.status for answer in answers] == [200] * 5
        assert len(rig.prefills[1].turns) == len(rig.decodes[1].turns) == 5


async def test_no_engine_left_is_a_503_that_says_when_to_come_back():
    """The only decode engine is gone: 503 with Retry-After, and /ready says which role lacks."""
    async with router() as rig:
        await rig.decode.stop()
        answer = await rig.post(turn_body())
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        ready = await rig.ask("GET", "/ready")
        assert (ready.status, ready.json) == (
            503,
            {"ready": False, "reason": "no decode engine is healthy"},
        )


async def test_ready_says_of_each_role_what_is_wrong_with_its_engines():
    """All drain; some drain and the rest are down; none is known. Turns are told so, too."""
    async with router("--health-failures=1", decodes=2) as rig:
        fleet, (prefill, *decodes) = (
            rig.server._fleet,
            [x.url for x in (*rig.prefills, *rig.decodes)],
        )

        async def reason() -> str:
            return (await rig.ask("GET", "/ready")).json["reason"]

        for url in decodes:
            fleet.drain(url, True)
        assert await reason() == "all decode engines are draining"
        answer = await rig.post(turn_body())
        message = answer.json["error"]["message"]
        assert message == "No decode engine is usable now: all decode engines are draining."
        fleet.drain(decodes[0], False)
        rig.decodes[0].healthy = False
        await rig.until(lambda: fleet.missing() == ["decode"])
        assert await reason() == "no decode engine is healthy that is not draining"
        fleet.remove(prefill, FLAGS)
        assert await reason() == (
            "no prefill engine is known; no decode engine is healthy that is not draining"
        )


async def test_a_router_is_no_engine():
    """It is named as an engine of its own: it is not used, and says why."""
    async with router() as rig:
        fleet = rig.server._fleet
        fleet.add(rig.url, "both", FLAGS)
        await rig.until(lambda: fleet.view(rig.url).reason.startswith("it is a kvturn router"))
        fleet.remove(rig.decode.url, FLAGS)
        assert (await rig.post(turn_body())).status == 503
        assert not fleet.view(rig.url).served


async def test_an_engine_comes_back_when_its_health_is_good_again():
    """Its port is open again but it is not healthy: no traffic. Healthy: traffic."""
    async with router("--health-failures=1") as rig:
        rig.decode.healthy = False
        await rig.until(lambda: rig.server._fleet.missing() == ["decode"])
        assert (await rig.post(turn_body())).status == 503
        assert rig.decode.turns == []
        rig.decode.healthy = True
        await rig.until_ready()
        assert (await rig.post(turn_body())).status == 200


async def test_one_bad_health_answer_does_not_take_an_engine_out():
    """Two failures in a row do, by default."""
    async with router() as rig:
        asked = 0

        async def flicker(seen: Seen, reply: Reply) -> None:
            nonlocal asked
            asked += 1
            await reply.whole(b"", 503 if asked % 2 else 200)

        rig.decode.script("/health", flicker)
        await rig.until(lambda: asked >= 6)
        assert (await rig.ask("GET", "/ready")).status == 200


async def test_an_engine_that_serves_turns_may_be_late_with_its_health_answer():
    """Busy, it answers turns and not the question; only when it answers neither it is out."""
    async with router("--health-failures=1", "--health-timeout-s=0.2") as rig:
        asked = 0

        async def hang(seen: Seen, reply: Reply) -> None:
            nonlocal asked
            asked += 1
            await seen.gone.wait()

        rig.decode.script("/health", hang)
        while asked < 4:
            assert (await rig.post(turn_body())).status == 200
        await rig.until(lambda: rig.server._fleet.missing() == ["decode"])


async def test_an_engine_whose_health_answer_does_not_end_is_out():
    """The beginning of that answer is no sign that it serves turns."""
    async with router("--health-failures=1", "--health-timeout-s=0.2") as rig:

        async def begin(seen: Seen, reply: Reply) -> None:
            await asyncio.sleep(0.05)  # By the loop's clock later than the question.
            await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
            await seen.gone.wait()

        rig.decode.script("/health", begin)
        await rig.until(lambda: rig.server._fleet.missing() == ["decode"])


async def test_a_router_that_comes_late_blames_no_engine(caplog):
    """Its process had no CPU for longer than a health answer may take: the answer counts."""
    async with router("--health-failures=1", "--health-timeout-s=0.2") as rig:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def wait(seen: Seen, reply: Reply) -> None:
            asked.set()
            await answer.wait()
            await reply.whole(b"", 200)

        rig.decode.script("/health", wait)
        await asked.wait()
        time.sleep(0.4)  # noqa: ASYNC251 (stands for the CPU that it does not get)
        asked.clear()
        await asked.wait()
        answer.set()
        assert (await rig.post(turn_body())).status == 200
        assert "is not usable" not in caplog.text


async def test_a_connection_that_a_late_router_missed_is_tried_once_more():
    """Its process had no CPU for longer than a connection may take: the engine is not to blame."""
    tried = 0

    def begin() -> ssl.SSLContext:  # Asked for with each attempt.
        nonlocal tried
        tried += 1
        if tried == 1:
            time.sleep(0.4)
        return cast("ssl.SSLContext", None)

    engine = await StubEngine("decode").start()
    port = int(engine.url.rpartition(":")[2])
    pool = EnginePool("127.0.0.1", port, connect_timeout_s=0.2, tls=begin)
    try:
        exchange = await pool.send(request_bytes(b"GET", b"/health", []), silence_s=GUARD_S)
        await exchange.answered()
        assert (tried, exchange.status) == (2, 200)
    finally:
        pool.close()
        await engine.stop()


async def test_an_answer_that_is_not_http_is_a_502():
    """Garbage from the engine ends the turn, not the router."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.raw(b"GARBAGE\r\n\r\n")
        reply.close()

    async with router() as rig:
        rig.decode.script(CHAT, play)
        assert (await rig.post(turn_body())).status == 502


@pytest.mark.parametrize("status", [202, 204, 304, 307, 600])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_is_neither_an_answer_nor_an_error_is_a_502(leg, status):
    """A redirection or an empty success tells a client nothing of its turn."""
    async with router() as rig:
        engine: StubEngine = getattr(rig, leg)

        async def play(seen: Seen, reply: Reply) -> None:
            await reply.raw(b"HTTP/1.1 %d X\r\nlocation: /\r\ncontent-length: 0\r\n\r\n" % status)

        engine.script(CHAT, play)
        answer = await rig.post(turn_body())
        assert answer.status == 502
        assert f"its status is {status}" in answer.json["error"]["message"]


async def test_turns_that_a_router_ends_when_it_stops_may_be_asked_again():
    """One is with prefill, one in line when the grace is over: 503 with Retry-After."""
    async with router("--max-inflight-per-engine=1", "--grace-s=0.1") as rig:
        rig.prefill.script(CHAT, silent)
        turns = [asyncio.create_task(rig.post(turn_body())) for _ in range(2)]
        await rig.until(lambda: len(rig.server._forwarder.admission.room) == 1)
        await rig.server.stop()
        answers = await asyncio.gather(*turns)
        assert [(one.status, one.headers["retry-after"]) for one in answers] == [(503, "1")] * 2


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(("well", "usable"), [(False, [True, False]), (True, [True, True])])
async def test_an_engine_that_fails_turn_after_turn_is_left_out(leg, well, usable):
    """Five in a row take it out though its health is good; not with turns between that go well."""
    # Asked after its health again only after a minute: it stays out while the turns are served.
    async with router("--health-interval-s=60", prefills=2, decodes=2) as rig:
        bad = (rig.prefills if leg == "prefill" else rig.decodes)[0]
        served = 0

        async def play(seen: Seen, reply: Reply) -> None:
            nonlocal served
            served += 1
            if well and served % 2:
                await (bad.prefill if leg == "prefill" else bad.decode)(seen, reply)
            elif leg == "decode":
                await reply.begin_stream()
                await reply.event(chunk({"content": "The"}))
                reply.abort()
            else:
                await reply.json({"error": {}}, 500)

        bad.script(CHAT, play)
        for _ in range(20):
            await rig.post(turn_body(stream=leg == "decode"))
        engines = (await rig.ask("GET", "/kvturn/v1/engines")).json["engines"]
        assert sorted(one["usable"] for one in engines if one["role"] == leg) == sorted(usable)
        assert served == (10 if well else 5)
