"""Whatever goes wrong with turns, each is counted out once wherever it was counted in."""

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter
from typing import Any

import pytest
from recorded_spans import Recording
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, GUARD_S, Play, Reply, Seen, StubEngine

from kvturn_router.request.intake import TurnRequest

TURNS = 300
SPAN_S = 1.0
HISTORY = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "When?"},
]


def moody(engine: StubEngine, chance: random.Random) -> Play:
    """Answers most turns well, and fails the others in every way that there is."""

    async def play(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(chance.random() * 0.01)
        mood = chance.randrange(20)
        if mood == 0:
            reply.abort()
        elif mood == 1:
            await reply.json({"error": {}}, chance.choice([400, 500]))
        elif mood == 2:
            await seen.gone.wait()
        elif mood == 3 and engine.role == "decode":
            await reply.begin_stream()
            reply.abort()
        elif engine.role == "decode":
            await engine.decode(seen, reply)
        else:
            await engine.prefill(seen, reply)

    return play


async def one_turn(rig: Rig, number: int, chance: random.Random) -> int:
    """Has a turn served by and by, or leaves it; returns its status, 0 if there is none."""
    await asyncio.sleep(chance.random() * SPAN_S)
    holders = [*(engine.url for engine in rig.decodes), "http://127.0.0.1:1", ""]
    rig.lease.http_address = chance.choice(holders)
    rig.lease.withholds = chance.random() < 0.05
    body = turn_body(messages=HISTORY, stream=number % 2 == 0, conversation_id=f"c{number % 40}")
    client = await rig.client()
    await client.send("POST", CHAT, json.dumps(body).encode())
    status = 0
    patience_s = 2 if chance.random() < 0.7 else chance.random() * 0.02
    with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        async with asyncio.timeout(patience_s):
            status = (await client.answer()).status
    client.close()
    return status


async def loads(rig: Rig) -> list[Any]:
    """Returns how many requests each engine is given now."""
    views = (await rig.ask("GET", "/kvturn/v1/engines")).json["engines"]
    return [view["in_flight"] for view in views]


@pytest.mark.parametrize("plan", ["pull", "local", "auto"])
async def test_turns_that_go_wrong_leave_nothing_behind(
    plan: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines fail, answers of the lease service stay away, clients leave, wherever a turn is."""
    chance = random.Random(plan)
    lease = FakeLease(lease_id="i.1.1")
    flags = [f"--plan={plan}"] if plan != "auto" else []
    flags += ["--max-inflight-per-engine=8", "--queue-timeout-s=0.3", "--question-deadline-ms=50"]
    async with router(*flags, prefills=2, decodes=2, lease=lease) as rig:
        for engine in (*rig.prefills, *rig.decodes):
            engine.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 32}
            engine.script(CHAT, moody(engine, chance))
        turns = (one_turn(rig, number, chance) for number in range(TURNS))
        statuses = Counter(await asyncio.gather(*turns))
        assert statuses[200] > TURNS / 10, statuses
        lease.withholds = False

        def ended() -> bool:
            # A service that is silent for a second is given up, and its session with the turns
            # that began on it; those that go on are told to the next one.
            if len(lease.hellos) > 1:
                return bool(lease.sessions) and not any(lease.open_turns.values())
            return len(lease.begun) == len(lease.turns_ended)

        await rig.until(ended)
        begun = Counter(begin.turn_id for begin in lease.begun)
        told = Counter(end.turn_id for end in lease.turns_ended)
        assert set(told.values()) == {1}
        assert told == begun or len(lease.hellos) > 1
        async with asyncio.timeout(GUARD_S):
            while any(await loads(rig)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert "a fault of the router" not in caplog.text


@pytest.mark.parametrize("odd", [-1, 1 << 31, 1 << 63, 1 << 70, 1e300, None, "7"], ids=str)
@pytest.mark.parametrize("leased", [True, False])
async def test_numbers_that_nothing_counts_to_spoil_no_turn(leased, odd):
    """In a report of prefill's connector, its usage, decode's: each turn is served and told."""
    report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 30, "local_tokens": 0}
    report |= {"read_ms": 1.0, "read_bytes": 5}
    lease, recording = FakeLease() if leased else None, Recording()
    async with router(lease=lease, tracing=recording.tracing) as rig:
        answer, usage = rig.prefill.prefill_answer(), rig.decode.usage()

        async def turn(**answers: Any) -> None:
            async def prefill(seen: Seen, reply: Reply) -> None:
                await reply.json(answer | answers)

            rig.prefill.script(CHAT, prefill)
            assert (await rig.post(turn_body(), CHAT)).status == 200

        for name in report.keys() - {"verdict"}:
            told = {"kvturn": report | {name: odd}}
            await turn(kv_transfer_params=rig.prefill.handle | told)
        for name in ("prompt_tokens", "completion_tokens"):
            await turn(usage=usage | {name: odd})
            rig.decode.usage = lambda name=name: usage | {name: odd}  # type: ignore[misc]
            await turn()
        if lease is not None:
            await lease.until(lambda: len(lease.turns_ended) == 9)
        assert [span.name for span in recording.spans()].count("turn") == 9


@pytest.mark.parametrize("reports", [True, False])
async def test_a_turn_that_is_over_is_no_longer_in_memory(reports):
    """Also while its grant never comes, and though nobody collects cycles."""
    lease = FakeLease()
    async with router(lease=lease) as rig:
        if reports:  # Then decode's connector is there, and would announce a retention.
            rig.prefill.report = {"verdict": "first_turn", "prompt_tokens": 48}
        gc.collect()
        gc.disable()
        try:
            client = await rig.client()
            for _ in range(20):
                await client.send("POST", CHAT, json.dumps(turn_body()).encode())
                assert (await client.answer()).status == 200
            await lease.until(lambda: len(lease.turns_ended) == 20)
            left = [one for one in gc.get_objects() if isinstance(one, TurnRequest)]
            assert len(left) <= 1
        finally:
            gc.enable()
