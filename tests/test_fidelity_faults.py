"""Faults that routers like this one had in production, each as a small trial."""

import asyncio
import gzip
import json
import time
from typing import Any

import pytest
from awake import ends_within, within
from recorded_spans import otlp_tracing
from router_harness import router, turn_body
from stub_engine import CHAT, Reply, Seen

from kvturn.otlp import PROTOCOLS
from kvturn_router.engines.engine_http import Exchange

BODY = json.dumps({"choices": [], "text": "x" * 5000}).encode()


async def test_a_compressed_answer_that_was_cut_is_no_answer():
    """The engine's gzip ends too early: 502, never the part that could be read."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(gzip.compress(BODY)[:-12], 200, ("Content-Encoding", "gzip"))

    async with router() as rig:
        rig.decode.script(CHAT, play)
        assert (await rig.post(turn_body())).status == 502


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_refusal_is_read_and_sent_plain(leg, stream):
    """The client did not ask for gzip; what it gets is the engine's own error."""
    error = b'{"error": {"message": "too long", "code": 400}}'

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(gzip.compress(error), 400, ("Content-Encoding", "gzip"))

    async with router() as rig:
        getattr(rig, leg).script(CHAT, play)
        answer = await rig.post(turn_body(stream=stream))
        assert (answer.status, answer.body) == (400, error)
        assert "content-encoding" not in answer.headers
        assert answer.headers["content-length"] == str(len(error))


async def test_a_handle_of_sixty_thousand_blocks_passes():
    """A very long prompt's KV, named block by block, reaches decode as prefill wrote it."""
    async with router() as rig:
        assert rig.prefill.handle is not None
        rig.prefill.handle["remote_block_ids"] = [list(range(60_000))]
        assert (await rig.post(turn_body())).status == 200
        assert rig.decode.turns[0].json["kv_transfer_params"] == rig.prefill.handle


async def test_clients_that_leave_between_the_legs_leave_nothing():
    """Fifty times decode has the request and has not answered: its connection ends each time.

    And fifty times it cannot be reached yet: then it fetches, for one token, what prefill holds
    for the turn. So prefill is asked once, and only once, for the KV of each of the hundred.
    """

    async def decode(seen: Seen, reply: Reply) -> None:
        if seen.json["max_tokens"] == 1:
            await rig.decode.decode(seen, reply)
        else:
            await seen.gone.wait()

    async def send_in_time(request: bytes, **how: Any) -> Exchange:
        if request.startswith(b"POST"):
            connecting.set()
            await reachable.wait()
        return await send(request, **how)

    connecting, reachable = asyncio.Event(), asyncio.Event()
    async with router() as rig:
        rig.prefill.number_handles()
        rig.decode.script(CHAT, decode)
        pool = rig.server._fleet.holder(rig.decode.url).pool
        send = pool.send
        pool.send = send_in_time  # type: ignore[method-assign]
        for number in range(100):
            is_reached = number % 2 == 0
            connecting.clear()
            (reachable.set if is_reached else reachable.clear)()
            client = await rig.client()
            await client.send("POST", CHAT, json.dumps(turn_body(stream=True)).encode())
            await connecting.wait()
            seen = await rig.decode.turn(number + 1) if is_reached else None
            client.close()
            await rig.until(lambda: rig.server._forwarder.in_flight == 0)
            if seen is not None:
                async with within(2):
                    await seen.gone.wait()
            reachable.set()
            await rig.decode.turn(number + 1)
        asked = [seen.json for seen in rig.decode.turns]
        assert [one["max_tokens"] for one in asked] == [16, 1] * 50
        handles = [one["kv_transfer_params"]["remote_request_id"] for one in asked]
        assert handles == [f"p-{number}" for number in range(100)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_collector_that_never_answers_slows_nothing(protocol):
    """It accepts connections and is silent: turns are as fast, and the shutdown is bounded."""
    accepted = []
    server = await asyncio.start_server(lambda *pair: accepted.append(pair), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tracing = otlp_tracing(f"http://127.0.0.1:{port}", protocol)
    took = []
    async with router(tracing=tracing) as rig:
        for _ in range(100):
            began = time.monotonic()
            assert (await rig.post(turn_body())).status == 200
            took.append(time.monotonic() - began)
        await rig.until(lambda: accepted)
    assert await asyncio.to_thread(ends_within, 3, tracing.shutdown)
    assert sorted(took)[98] < 1
    for _, writer in accepted:
        writer.close()
    server.close()
