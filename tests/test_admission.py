"""Turns that wait, in real time, until an engine has room for them."""

import asyncio
import time

import pytest

from kvturn_router.admission import Admission
from kvturn_router.engine import Engine, EngineAddress
from kvturn_router.errors import TurnError
from kvturn_router.fleet import FLAGS, Fleet
from kvturn_router.health import Health
from kvturn_router.waiting import WaitingRoom


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Rig:
    """One decode engine with room for one turn, and a line."""

    def __init__(self, *, places: int = 10, patience_s: float = 60) -> None:
        def build(address: EngineAddress, number: int) -> Engine:
            health = Health(interval_ns=1, failures_max=1, faults_max=1, phase=0, now_ns=0)
            return Engine(address, health=health, connect_timeout_s=1, in_flight_max=1)

        self.fleet = Fleet(build, boottime_ns)
        self.engine = self.fleet.add("http://d:1", "decode", FLAGS)
        self.fleet.seen_well(self.engine)
        self.room: WaitingRoom[Engine] = WaitingRoom(
            places=places, patience_ns=round(patience_s * 1e9)
        )
        self._admission = Admission(self.fleet, self.room, boottime_ns)

    async def claim(self) -> Engine:
        def take() -> Engine | None:
            engine = self.fleet.decodes.least()
            if engine is None and not self.engine.available:
                raise LookupError
            if engine is not None:
                engine.begin()
            return engine

        return await self._admission.claim(take, Engine.end)

    async def waiting(self, count: int) -> list[asyncio.Task[Engine]]:
        """That many turns in line, in the order in which they came."""
        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(self.claim()))
            while len(self.room) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return tasks


async def test_turns_are_served_in_the_order_in_which_they_came():
    """Each as soon as the one before it has ended."""
    rig = Rig()
    assert await rig.claim() is rig.engine
    line = await rig.waiting(3)
    for task in line:
        rig.engine.end()
        async with asyncio.timeout(5):
            assert await task is rig.engine
        assert rig.engine.in_flight == 1
    assert len(rig.room) == 0


async def test_a_client_that_leaves_the_line_leaves_its_place():
    """Also one that leaves in the moment in which it has been served."""
    rig = Rig()
    await rig.claim()
    first, second, third = await rig.waiting(3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    rig.engine.end()
    second.cancel()  # it has its engine, and has not heard of it yet
    await asyncio.gather(second, return_exceptions=True)
    async with asyncio.timeout(5):
        assert await third is rig.engine
    rig.engine.end()
    assert rig.engine.in_flight == 0


async def test_a_wait_ends_with_a_429_that_says_when_to_come_back():
    """Too long a wait, and too long a line."""
    rig = Rig(places=1, patience_s=0.02)
    await rig.claim()
    (waiting,) = await rig.waiting(1)
    with pytest.raises(TurnError) as full:
        await rig.claim()
    with pytest.raises(TurnError) as late:
        await waiting
    for refusal in (full.value, late.value):
        assert (refusal.status, refusal.retry_after_s) == (429, 1)
    rig.engine.end()
    assert await rig.claim() is rig.engine


async def test_those_in_line_hear_when_no_engine_is_left():
    """The engine drains: nobody waits for what cannot come."""
    rig = Rig()
    await rig.claim()
    (waiting,) = await rig.waiting(1)
    rig.fleet.drain("http://d:1", True)
    with pytest.raises(LookupError):
        await waiting
