"""Two lease services on one etcd: the leader killed or frozen, engines and routers that follow.

Real processes; engines use the connector's own client.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from etcd_server import EtcdServer, until
from lease_rig import (
    GUARD_S,
    HEARTBEAT_S,
    LEADERSHIP_S,
    OUTLIVING,
    OUTLIVING_HOLD_S,
    Engine,
    LeaseProcess,
    conversation,
    engine_process,
    lease_cluster,
    lease_of,
    timed,
)
from router_harness import router, turn_body

from kvturn.lease_channels import error_info
from kvturn.v1 import lease_pb2
from kvturn_connector.reader import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.fault

QUESTION_S = 0.2
FAILOVER_S = 2.0 * LEADERSHIP_S + 2.0
"""The leadership runs out, the next one is elected; the rest is a busy machine's."""


@asynccontextmanager
async def two_services(folder: Path, *flags: str) -> AsyncIterator[list[LeaseProcess]]:
    """The leader and the standby."""
    async with EtcdServer(folder) as etcd, lease_cluster(folder, etcd, *flags) as services:
        yield services


def break_it(service: LeaseProcess, fault: str) -> None:
    if fault == "killed":
        service.kill()
    else:
        service.freeze()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_engines_follow_the_leader_and_reuse_is_back(tmp_path: Path, fault: str) -> None:
    """No question waits but the first; decode is registered two heartbeats after the election.

    What it held all the while can be read from the new leader once no reader of the old one can
    be left, under a new lease id; the old one is never granted again.
    """
    async with two_services(tmp_path, OUTLIVING) as (leader, standby):
        endpoints = [leader.endpoint, standby.endpoint]
        async with (
            Engine(endpoints) as decode,
            Engine(endpoints, "p1") as prefill,
            Engine(endpoints, "p2", question_s=QUESTION_S) as hasty,
        ):
            for number, name in enumerate(("a", "b"), start=1):
                decode.retain(number, name)
            lease_a, lease_b = [await leader.lease_of(name) for name in ("a", "b")]
            assert await prefill.granted(lease_a, "a")

            break_it(leader, fault)
            broken_s = time.monotonic()
            answers = [await timed(hasty.ask(lease_b, "b")) for _ in range(20)]
            assert not any(isinstance(answer, Answer) and answer.granted for answer, _ in answers)
            assert sum(seconds for _, seconds in answers) < 20 * QUESTION_S / 2

            await until(standby.leads)
            elected_s = time.monotonic()
            assert elected_s - broken_s < FAILOVER_S

            async def registered() -> bool:
                return "d1" in await standby.engines()

            await until(registered)
            assert time.monotonic() - elected_s < 2 * HEARTBEAT_S + 1.0
            decode.retain(3, "c")
            assert await prefill.granted(await standby.lease_of("c"), "c")
            assert time.monotonic() - elected_s < 3.0
            assert not await prefill.granted(lease_b, "b")
            if fault == "frozen":
                return  # The next test reads what it held before.
            lease_new = await standby.lease_of("b")
            assert lease_new != lease_b
            assert 2 not in decode.freed
            assert time.monotonic() - broken_s > OUTLIVING_HOLD_S - HEARTBEAT_S
            assert await prefill.granted(lease_new, "b")
            assert not await prefill.granted(lease_new, "b")


async def test_a_leader_that_wakes_up_never_answers_as_leader(tmp_path: Path) -> None:
    """Questions that waited for it all through its freeze, and all that come later, are refused.

    One that it had granted just before is not granted again by the next leader.
    """
    async with two_services(tmp_path, OUTLIVING) as (leader, standby):
        endpoints = [leader.endpoint, standby.endpoint]
        async with Engine(endpoints) as decode, Engine(endpoints, "p1") as prefill:
            for number, name in enumerate(("a", "b"), start=1):
                decode.retain(number, name)
            lease_a, lease_b = [await leader.lease_of(name) for name in ("a", "b")]
            assert await prefill.granted(lease_a, "a")
            leader.freeze()
            waiting = [
                asyncio.create_task(_ask_directly(leader, lease_id, name))
                for lease_id, name in ((lease_a, "a"), (lease_b, "b"))
                for _ in range(5)
            ]
            await until(standby.leads)
            lease_new = await lease_of([standby], "b")
            leader.resume()
            assert set(await asyncio.gather(*waiting)) == {"NOT_LEADER"}
            for _ in range(20):
                assert await leader.stance() == "NOT_LEADER"
                assert await _ask_directly(leader, lease_b, "b") == "NOT_LEADER"
            assert await standby.leads()
            assert not await prefill.granted(lease_a, "a")
            assert await prefill.granted(lease_new, "b")
            assert not await prefill.granted(lease_new, "b")


async def _ask_directly(service: LeaseProcess, lease_id: str, name: str) -> str:
    """Sends BeginRead to this service alone; returns "granted", "refused" or why it has no answer.

    That is the error's reason, or its code where it has none.
    """
    question = lease_pb2.BeginReadRequest(
        lease_id=lease_id, conversation=conversation(name), reader_engine_id="p9"
    )
    try:
        answer = await service.call("BeginRead", question, timeout_s=GUARD_S)
    except grpc.RpcError as error:
        call = cast("grpc.Call", error)
        return error_info(call)[0] or str(call.code())
    return "granted" if answer.granted else "refused"


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_one_of_many_readers_is_granted_whoever_leads(tmp_path: Path, fault: str) -> None:
    """Three engines ask for every lease again and again while the leader goes away under them."""
    async with two_services(tmp_path, OUTLIVING) as (leader, standby), AsyncExitStack() as stack:
        endpoints = [leader.endpoint, standby.endpoint]
        decode = await stack.enter_async_context(Engine(endpoints))
        readers = [
            await stack.enter_async_context(Engine(endpoints, f"p{index}", question_s=QUESTION_S))
            for index in range(3)
        ]
        names = [f"c{number}" for number in range(1, 9)]
        for number, name in enumerate(names, start=1):
            decode.retain(number, name)
        lease_ids = {await leader.lease_of(name): name for name in names[:-2]}
        grants: dict[str, int] = {}
        elected = asyncio.Event()

        async def read(reader: Engine) -> None:
            rounds_after = 0
            while rounds_after < 3:
                rounds_after += elected.is_set()
                await asyncio.sleep(0.01)  # Refusals come fast; leave the machine to the others.
                for lease_id, name in list(lease_ids.items()):
                    if await reader.granted(lease_id, name):
                        grants[lease_id] = grants.get(lease_id, 0) + 1

        async def fail_over() -> None:
            await until(lambda: bool(grants))
            break_it(leader, fault)
            await until(standby.leads)
            for name in names[-2:]:
                lease_ids[await standby.lease_of(name)] = name
            if fault == "frozen":
                leader.resume()
            elected.set()

        await asyncio.gather(fail_over(), *(read(reader) for reader in readers))
        assert max(grants.values()) == 1
        assert all(grants[lease_id] == 1 for lease_id in list(lease_ids)[-2:])


async def test_an_engine_frozen_across_a_failover_comes_back_to_the_new_leader(
    tmp_path: Path,
) -> None:
    """It wakes up in a session with a leader that is gone; what it held has run out."""
    async with two_services(tmp_path) as (leader, standby):
        endpoints = [leader.endpoint, standby.endpoint]
        async with (
            Engine(endpoints, "p1") as prefill,
            engine_process(endpoints, "d1", "one") as decode,
        ):
            await decode.tell("retain", 1, "a")
            lease_id = await leader.lease_of("a")
            decode.send_signal(signal.SIGSTOP)
            leader.kill()
            await until(standby.leads)
            decode.send_signal(signal.SIGCONT)

            async def freed() -> bool:
                return await decode.freed() == [1]

            await until(freed)
            await decode.tell("retain", 2, "b")
            assert await prefill.granted(await standby.lease_of("b"), "b")
            assert not await prefill.granted(lease_id, "a")


async def test_turns_are_served_through_a_failover(tmp_path: Path) -> None:
    """Each is answered; in between they say that nobody leads, afterwards the new leader's word."""
    async with two_services(tmp_path) as (leader, standby):
        given = f"--lease={leader.endpoint},{standby.endpoint}"
        async with router(given, f"--question-deadline-ms={round(QUESTION_S * 1000)}") as rig:
            assert (await rig.post(turn_body())).verdict == "first_turn"
            leader.freeze()
            frozen_s = time.monotonic()
            verdicts: list[str] = []

            async def back() -> bool:
                answer = await rig.post(turn_body())
                assert answer.status == 200
                verdicts.append(answer.verdict)
                return answer.verdict == "first_turn"

            await until(back)
            assert time.monotonic() - frozen_s < FAILOVER_S
            assert set(verdicts[:-1]) == {"lease_service_unreachable"}
            path = "/kvturn/v1/conversations/c1/keepalive?model=m"
            await rig.post(turn_body(conversation_id="c1"))
            assert (await rig.ask("POST", path, b'{"absence_s": 5}')).status == 200


async def test_a_lease_service_that_stops_in_order_hands_over_at_once(tmp_path: Path) -> None:
    """SIGTERM, as in an upgrade: nobody waits for the leadership to run out."""
    async with two_services(tmp_path) as (leader, standby):
        endpoints = [leader.endpoint, standby.endpoint]
        async with Engine(endpoints) as decode:
            await decode.until_registered()
            leader.terminate()
            stopped_s = time.monotonic()

            async def registered() -> bool:
                return "d1" in await standby.engines()

            await until(registered)
            assert time.monotonic() - stopped_s < LEADERSHIP_S + 1.0
            decode.retain(1, "a")
            await standby.lease_of("a")
