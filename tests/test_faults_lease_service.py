"""The lease service frozen, swallowed by the network, killed: prefill never waits for it.

Real processes of the lease service, with the memory store, and the connector's own client.
"""

from __future__ import annotations

import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from awake import within
from etcd_server import until
from lease_rig import (
    HEARTBEAT_S,
    HOLD_S,
    HOLD_SLACK_S,
    HOST,
    SESSION_TTL_S,
    UNREACHABLE,
    Engine,
    LeaseProcess,
    engine_process,
    steadily,
    timed,
)
from router_harness import router, turn_body
from stub_engine import CHAT, Reply, Seen
from tcp_proxy import TcpProxy

from kvturn_connector.reader import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

QUESTIONS = 40
QUESTION_S = 0.2
LATE_S = 0.5
"""A single answer that a busy machine may hold up for so long is still not one of seconds."""


class Service:
    """A lease service behind a proxy, and ways to break and mend it."""

    def __init__(self, process: LeaseProcess, proxy: TcpProxy) -> None:
        self.process = process
        self.proxy = proxy
        self.endpoint = f"{HOST}:{proxy.port}"

    def break_it(self, fault: str) -> None:
        match fault:
            case "frozen":
                self.process.freeze()
            case "swallowed":
                self.proxy.swallow = True
            case "killed":
                self.process.kill()

    async def mend(self, fault: str) -> None:
        """Returns when it answers again; a restarted one has forgotten everything."""
        match fault:
            case "frozen":
                self.process.resume()
            case "swallowed":
                self.proxy.swallow = False
            case "killed":
                self.process.launch()
        await until(self.process.listens)


@asynccontextmanager
async def lease_service(folder: Path) -> AsyncIterator[Service]:
    async with (
        LeaseProcess(folder) as process,
        TcpProxy(HOST, process.port) as proxy,
    ):
        yield Service(process, proxy)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["frozen", "swallowed", "killed"])
async def test_prefill_is_answered_whatever_the_lease_service_does(
    tmp_path: Path, fault: str
) -> None:
    """At most one question waits for the deadline; reuse is back seconds after it is mended.

    Decode frees what it held meanwhile: as late as a reader may need it, and no later.
    """
    async with (
        lease_service(tmp_path) as service,
        Engine([service.endpoint]) as decode,
        Engine([service.endpoint], "p1") as prefill,
        Engine([service.endpoint], "p2", question_s=QUESTION_S) as hasty,
    ):
        for number, name in enumerate(("a", "b"), start=1):
            decode.retain(number, name)
        lease_a = await service.process.lease_of("a")
        lease_b = await service.process.lease_of("b")
        assert await prefill.granted(lease_a, "a")

        service.break_it(fault)
        broken_s = time.monotonic()
        answers = [await timed(hasty.ask(lease_b, "b")) for _ in range(QUESTIONS)]
        assert {answer for answer, _ in answers} == {UNREACHABLE}
        assert max(seconds for _, seconds in answers) < LATE_S
        assert sum(seconds for _, seconds in answers) < QUESTIONS * QUESTION_S / 2

        await until(lambda: 2 in decode.freed)
        held_s = decode.freed[2] - broken_s
        assert held_s > HOLD_S - HEARTBEAT_S
        assert held_s < SESSION_TTL_S + HOLD_S + HOLD_SLACK_S + LATE_S

        await service.mend(fault)
        mended_s = time.monotonic()

        for reader in (hasty, prefill):
            await until(lambda reader=reader: _hears(reader, lease_b, "b"))
        decode.retain(3, "c")
        lease_c = await service.process.lease_of("c")
        assert await prefill.granted(lease_c, "c")
        assert time.monotonic() - mended_s < 3.0
        assert not await prefill.granted(lease_b, "b")


async def _hears(reader: Engine, lease_id: str, name: str) -> bool:
    return isinstance(await reader.ask(lease_id, name), Answer)


@pytest.mark.parametrize("fault", ["frozen", "swallowed", "killed"])
async def test_turns_are_served_whatever_the_lease_service_does(tmp_path: Path, fault: str) -> None:
    """All of them, recomputed and with the verdict that says why."""
    async with (
        lease_service(tmp_path) as service,
        router(f"--lease={service.endpoint}", "--question-deadline-ms=200") as rig,
    ):

        async def answers() -> bool:
            # A new one each time: by now the service may know that of the turns before.
            fresh = turn_body(conversation_id=f"c-{time.monotonic_ns()}")
            return (await rig.post(fresh)).verdict == "first_turn"

        await until(answers)
        service.break_it(fault)
        async with within(20 * 0.2 / 2):
            turns = [await rig.post(turn_body()) for _ in range(20)]
        assert {(answer.status, answer.verdict) for answer in turns} == {
            (200, "lease_service_unreachable")
        }
        await service.mend(fault)
        async with within(3):
            await until(answers)


@pytest.mark.fault
async def test_a_session_outlives_a_freeze_shorter_than_its_ttl(tmp_path: Path) -> None:
    """What was retained before can be read after: nothing was forgotten, nothing waits."""
    async with (
        lease_service(tmp_path) as service,
        Engine([service.endpoint]) as decode,
        Engine([service.endpoint], "p1") as prefill,
        Engine([service.endpoint], "p2", question_s=QUESTION_S) as hasty,
    ):
        decode.retain(1, "a")
        lease_id = await service.process.lease_of("a")
        service.break_it("frozen")
        assert await hasty.ask(lease_id, "a") == UNREACHABLE
        await service.mend("frozen")
        decode.retain(2, "b")
        lease_id = await service.process.lease_of("b")
        assert await prefill.granted(lease_id, "b")
        assert 2 not in decode.freed


@pytest.mark.fault
async def test_a_stuck_read_is_given_up_by_what_the_lease_service_says(tmp_path: Path) -> None:
    """Granted, posted, and no word since: the router sends the turn again without the lease."""
    async with (
        lease_service(tmp_path) as service,
        router(
            f"--lease={service.endpoint}", "--read-margin-ms=100", "--question-deadline-ms=5000"
        ) as rig,
        Engine([service.endpoint], http_address=rig.decode.url) as decode,
        Engine([service.endpoint], "p1") as prefill,
    ):
        decode.retain(1, "a")
        await until(lambda: decode.client.registered)

        async def play(seen: Seen, reply: Reply) -> None:
            lease_id = seen.json["kv_transfer_params"]["kvturn"].get("lease_id")
            if lease_id:
                assert await prefill.granted(lease_id, "a")
                await seen.gone.wait()
            else:
                await reply.json(rig.prefill.prefill_answer())

        rig.prefill.script(CHAT, play)
        verdicts: list[str] = []

        async def read() -> bool:
            answer = await rig.post(turn_body(conversation_id="a"))
            verdicts.append(answer.verdict)
            return answer.status == 200 and answer.verdict == "read_too_long"

        await until(read)
        assert set(verdicts[:-1]) <= {"no_lease", "first_turn"}
        await until(lambda: 1 in decode.freed)


# --- decode engines -------------------------------------------------------------------------------


@pytest.mark.fault
async def test_a_killed_engine_is_gone_at_once(tmp_path: Path) -> None:
    """Its stream ends; nobody is sent to it, nobody may read from it."""
    async with (
        lease_service(tmp_path) as service,
        Engine([service.endpoint], "p1") as prefill,
        engine_process([service.endpoint], "d1", "one") as decode,
    ):
        await decode.tell("retain", 1, "a")
        lease_id = await service.process.lease_of("a")
        decode.send_signal(signal.SIGKILL)
        await until(lambda: _is_away(service.process, "d1"))
        assert not (await service.process.resolve("a")).lease_id
        assert not await prefill.granted(lease_id, "a")


async def _is_away(process: LeaseProcess, name: str) -> bool:
    return name not in await process.engines()


@pytest.mark.fault
async def test_a_frozen_engine_is_not_read_from_and_comes_back_with_what_it_still_holds(
    tmp_path: Path,
) -> None:
    """Longer than its trust: its lease ends with it. Resumed, it frees what ran out meanwhile."""
    async with (
        lease_service(tmp_path) as service,
        Engine([service.endpoint], "p1") as prefill,
        engine_process([service.endpoint], "d1", "one") as decode,
    ):
        await decode.tell("retain", 1, "a")
        lease_id = await service.process.lease_of("a")
        frozen_s = time.monotonic()
        decode.send_signal(signal.SIGSTOP)
        await until(lambda: _is_away(service.process, "d1"))
        assert time.monotonic() - frozen_s < SESSION_TTL_S + LATE_S
        assert not await prefill.granted(lease_id, "a")
        await until(lambda: time.monotonic() > frozen_s + HOLD_S + HOLD_SLACK_S)
        decode.send_signal(signal.SIGCONT)

        async def freed() -> bool:
            return await decode.freed() == [1]

        await until(freed)
        await decode.until_registered()
        assert not await prefill.granted(lease_id, "a")
        await decode.tell("retain", 2, "b")
        lease_id = await service.process.lease_of("b")
        assert await prefill.granted(lease_id, "b")


@pytest.mark.fault
async def test_an_engine_restarted_under_its_name_fences_the_one_before(tmp_path: Path) -> None:
    """The old one was only frozen: when it wakes up it gets no session, and is never read from."""
    async with (
        lease_service(tmp_path) as service,
        Engine([service.endpoint], "p1") as prefill,
        engine_process([service.endpoint], "d1", "one") as old,
    ):
        await old.tell("retain", 1, "a")
        lease_old = await service.process.lease_of("a")
        old.send_signal(signal.SIGSTOP)
        async with engine_process([service.endpoint], "d1", "two") as new:
            await new.tell("retain", 1, "b")
            lease_new = await service.process.lease_of("b")
            assert lease_new.startswith("two.")
            old.send_signal(signal.SIGCONT)

            async def fenced() -> bool:
                state = await old.tell("state")
                return not state["registered"] and state["freed"] == [1]

            await until(fenced)

            async def new_stays() -> bool:
                return bool((await new.tell("state"))["registered"])

            assert await steadily(new_stays, 3 * HEARTBEAT_S)
            assert not (await service.process.resolve("a")).lease_id
            assert not await prefill.granted(lease_old, "a")
            assert await prefill.granted(lease_new, "b")
