"""etcd killed, frozen, wiped, compacted, full, restarted again and again: what turns notice.

Real processes; engines use the connector's own client.
"""

from __future__ import annotations

import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from etcd_server import EtcdServer, until
from lease_rig import (
    HEARTBEAT_S,
    HOLD_S,
    HOLD_SLACK_S,
    LEADERSHIP_S,
    SESSION_TTL_S,
    Engine,
    LeaseProcess,
    engine_process,
    leader_of,
    lease_cluster,
    lease_of,
    steadily,
    timed,
)
from router_harness import router, turn_body

from kvturn.v1 import common_pb2
from kvturn_connector.reader import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.fault

QUESTION_S = 0.2
LATE_S = 2.0
"""What a busy machine may add to a bound."""


@asynccontextmanager
async def one_service(folder: Path) -> AsyncIterator[tuple[EtcdServer, LeaseProcess]]:
    async with EtcdServer(folder) as etcd, lease_cluster(folder, etcd, count=1) as (leader,):
        yield etcd, leader


async def break_etcd(etcd: EtcdServer, fault: str) -> None:
    if fault == "frozen":
        etcd.freeze()
    else:
        etcd.kill()
        if fault == "wiped":
            etcd.wipe()


async def mend_etcd(etcd: EtcdServer, fault: str) -> None:
    if fault == "frozen":
        etcd.resume()
    else:
        await etcd.start()


@pytest.mark.parametrize("fault", ["killed", "frozen", "wiped"])
async def test_without_etcd_nobody_leads_and_turns_recompute(tmp_path: Path, fault: str) -> None:
    """The leader's term runs out, questions are refused at once, decode frees what it held.

    With etcd back there is a leader again, with or without its memory, and reuse is back.
    """
    async with (
        one_service(tmp_path) as (etcd, leader),
        Engine([leader.endpoint]) as decode,
        Engine([leader.endpoint], "p1") as prefill,
        Engine([leader.endpoint], "p2", question_s=QUESTION_S) as hasty,
        router(f"--lease={leader.endpoint}", "--question-deadline-ms=1000") as rig,
    ):
        decode.retain(1, "a")
        lease_id = await leader.lease_of("a")
        await break_etcd(etcd, fault)
        broken_s = time.monotonic()

        async def gives_up() -> bool:
            return not await leader.leads()

        await until(gives_up)
        assert time.monotonic() - broken_s < LEADERSHIP_S + LATE_S

        async def says_why() -> bool:
            return await leader.stance() == "STORE_UNAVAILABLE"

        await until(says_why)
        answers = [await timed(hasty.ask(lease_id, "a")) for _ in range(20)]
        assert {answer for answer, _ in answers} == {common_pb2.VERDICT_STORE_UNAVAILABLE}
        assert sum(seconds for _, seconds in answers) < 20 * QUESTION_S / 2

        async def turns_say_why() -> bool:
            answer = await rig.post(turn_body())
            assert answer.status == 200
            return bool(answer.verdict == "store_unavailable")

        # The router asks anew only after a while.
        await until(turns_say_why)
        await until(lambda: 1 in decode.freed)
        assert decode.freed[1] - broken_s < LEADERSHIP_S + HOLD_S + HOLD_SLACK_S + LATE_S

        await mend_etcd(etcd, fault)
        mended_s = time.monotonic()
        await until(leader.leads)
        await decode.until_registered()
        assert time.monotonic() - mended_s < LEADERSHIP_S + 2 * HEARTBEAT_S + LATE_S
        decode.retain(2, "b")
        assert await prefill.granted(await leader.lease_of("b"), "b")
        assert not await prefill.granted(lease_id, "a")

        async def asks_again() -> bool:
            answer = await rig.post(turn_body())
            assert answer.status == 200
            return answer.verdict == "first_turn"

        await until(asks_again)


async def test_a_short_outage_of_etcd_is_not_noticed(tmp_path: Path) -> None:
    """Shorter than the leadership: same term, same sessions, reads go on all the while."""
    async with (
        one_service(tmp_path) as (etcd, leader),
        Engine([leader.endpoint]) as decode,
        Engine([leader.endpoint], "p1") as prefill,
    ):
        for number, name in enumerate(("a", "b"), start=1):
            decode.retain(number, name)
        lease_a, lease_b = [await leader.lease_of(name) for name in ("a", "b")]
        etcd.freeze()
        assert await prefill.granted(lease_a, "a")
        decode.retain(3, "c")
        assert await prefill.granted(await leader.lease_of("c"), "c")
        etcd.resume()
        assert await steadily(leader.leads, LEADERSHIP_S + 0.5)
        assert await prefill.granted(lease_b, "b")
        assert 2 not in decode.freed


async def test_compaction_costs_no_leader_and_no_failover(tmp_path: Path) -> None:
    """History goes while a standby sleeps; awake again it still takes over when its turn comes."""
    async with (
        EtcdServer(tmp_path) as etcd,
        lease_cluster(tmp_path, etcd) as (leader, standby),
        Engine([leader.endpoint, standby.endpoint]) as decode,
        Engine([leader.endpoint, standby.endpoint], "p1") as prefill,
    ):
        decode.retain(1, "a")
        await leader.lease_of("a")
        standby.freeze()
        for number in range(3):
            await etcd.ctl("put", "other", str(number))
        await etcd.ctl("compact", str(await _revision(etcd)))
        standby.resume()
        decode.retain(2, "b")
        assert await prefill.granted(await leader.lease_of("b"), "b")
        assert await leader.leads()
        leader.kill()
        await until(standby.leads)
        decode.retain(3, "c")
        assert await prefill.granted(await standby.lease_of("c"), "c")


async def _revision(etcd: EtcdServer) -> int:
    lines = (await etcd.ctl("get", "nothing", "-w", "fields")).splitlines()
    return int(next(line for line in lines if '"Revision"' in line).split(" : ")[1])


async def test_a_full_etcd_stops_no_reads(tmp_path: Path) -> None:
    """Out of quota: records are lost, the leader leads on. It dies: nobody can until there is room.

    Then the engines bring what they hold, and reuse is back.
    """
    async with (
        EtcdServer(tmp_path, "--quota-backend-bytes=1500000") as etcd,
        lease_cluster(tmp_path, etcd) as (leader, standby),
        Engine([leader.endpoint, standby.endpoint]) as decode,
        Engine([leader.endpoint, standby.endpoint], "p1") as prefill,
    ):
        await decode.until_registered()
        while "NOSPACE" not in await etcd.ctl("alarm", "list"):
            await etcd.ctl("put", f"fill/{time.monotonic_ns()}", "x" * 120_000, ok=False)
        for number, name in enumerate(("a", "b"), start=1):
            decode.retain(number, name)
            assert await prefill.granted(await leader.lease_of(name), name)
        assert await steadily(leader.leads, LEADERSHIP_S + 0.5)
        leader.kill()

        async def nobody_leads() -> bool:
            return await standby.stance() == "STORE_UNAVAILABLE"

        await until(nobody_leads)
        assert await prefill.ask("d1.9.9", "a") == common_pb2.VERDICT_STORE_UNAVAILABLE
        await etcd.ctl("del", "fill/", "--prefix")
        await etcd.ctl("compact", str(await _revision(etcd)))
        await etcd.ctl("defrag")
        await etcd.ctl("alarm", "disarm")
        await until(standby.leads)
        decode.retain(3, "c")
        assert await prefill.granted(await standby.lease_of("c"), "c")


async def test_an_etcd_that_restarts_near_the_end_of_every_ttl_revives_no_engine(
    tmp_path: Path,
) -> None:
    """Each restart gives all its leases their full TTL again; the engine stays dead all the same.

    Also for the next leader, which finds the engine's records.
    """
    async with (
        EtcdServer(tmp_path) as etcd,
        lease_cluster(tmp_path, etcd) as (leader, standby),
        Engine([leader.endpoint, standby.endpoint], "p1") as prefill,
    ):
        services = [leader, standby]
        async with engine_process([one.endpoint for one in services], "d1", "one") as decode:
            await decode.tell("retain", 1, "a")
            lease_id = await lease_of(services, "a")
            decode.send_signal(signal.SIGSTOP)

            async def is_away() -> bool:
                return "d1" not in [name for each in services for name in await each.engines()]

            await until(is_away)

            async def is_dead() -> bool:
                for service in services:
                    if await service.leads():
                        assert "d1" not in await service.engines()
                        assert not (await service.resolve("a")).lease_id
                return not await prefill.granted(lease_id, "a")

            for _ in range(3):
                assert await steadily(is_dead, 0.7 * SESSION_TTL_S)
                etcd.kill()
                await etcd.start()
            now_leads = await leader_of(services)
            now_leads.kill()
            other = standby if now_leads is leader else leader
            services.remove(now_leads)
            await until(other.leads)
            assert await steadily(is_dead, HOLD_S)
            decode.send_signal(signal.SIGCONT)

            async def freed() -> bool:
                return await decode.freed() == [1]

            await until(freed)
            await decode.tell("retain", 2, "b")
            assert await prefill.granted(await lease_of(services, "b"), "b")


async def test_a_question_after_etcd_is_back_is_answered(tmp_path: Path) -> None:
    """The engine that asks is not left with the standby that told it that nobody leads."""
    async with (
        EtcdServer(tmp_path) as etcd,
        lease_cluster(tmp_path, etcd) as services,
        Engine([one.endpoint for one in services]) as decode,
        Engine([one.endpoint for one in services], "p1") as prefill,
    ):
        await decode.until_registered()
        etcd.freeze()

        async def nobody_leads() -> bool:
            return {await one.stance() for one in services} == {"STORE_UNAVAILABLE"}

        await until(nobody_leads)
        assert await prefill.ask("d1.9.9", "a") == common_pb2.VERDICT_STORE_UNAVAILABLE
        etcd.resume()
        await leader_of(services)

        async def answered() -> bool:
            return isinstance(await prefill.ask("d1.9.9", "a"), Answer)

        await until(answered)
        await decode.until_registered()
        decode.retain(1, "a")
        assert await prefill.granted(await lease_of(services, "a"), "a")
