"""Turns that wait, in real time, until an engine has room for them."""

import asyncio

import pytest
from router_harness import FakeLease, router, turn_body
from stub_engine import CHAT, Reply, Seen

from kvturn.address import EngineAddress
from kvturn.clock import boottime_ns
from kvturn_router.engines.admission import Admission
from kvturn_router.engines.engine import DECODE, PREFILL, Engine
from kvturn_router.engines.fleet import FLAGS, Fleet
from kvturn_router.engines.health import Health
from kvturn_router.engines.waiting import NoPlace, NoRoom, Waiting, WaitingRoom
from kvturn_router.errors import TurnError


class Rig:
    """One decode engine with room for one turn, and a line."""

    def __init__(self, *, places: int = 10, patience_s: float = 60) -> None:
        def build(address: EngineAddress, number: int) -> Engine:
            health = Health(interval_ns=1, failures_max=1, faults_max=1, phase=0, now_ns=0)
            return Engine(address, health=health, connect_timeout_s=1, in_flight_max=1)

        self.fleet = Fleet(build, boottime_ns)
        self.engine = self.fleet.add("http://d:1", "decode", FLAGS)
        self.fleet.seen_well(self.engine)
        self.room = WaitingRoom(roles=[DECODE], places=places, patience_ns=round(patience_s * 1e9))
        self._admission = Admission(self.fleet, self.room, boottime_ns)

    async def claim(self) -> Engine:
        def take() -> Engine:
            engine = self.fleet.decodes.least()
            if engine is None:
                raise NoRoom(DECODE) if self.engine.available else LookupError
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


class Lines:
    """A prefill and a decode engine with so much room, and turns that take what they need."""

    def __init__(self, **room: int) -> None:
        self.left = {PREFILL: room["prefill"], DECODE: room["decode"]}
        self.asked: list[str] = []
        self.room = WaitingRoom(roles=(DECODE, PREFILL), places=10, patience_ns=9)

    def turn(self, name: str, *needs: str) -> Waiting[str]:
        def take() -> str:
            self.asked.append(name)
            for role in (DECODE, PREFILL):
                if role in needs and not self.left[role]:
                    raise NoRoom(role)
            for role in needs:
                self.left[role] -= 1
            return name

        return self.room.claim(take, 0)

    def frees(self, role: str) -> list[str]:
        """Makes room for one turn; returns who was asked."""
        self.left[role] += 1
        self.asked.clear()
        self.room.serve()
        return self.asked


def test_who_waits_for_prefill_keeps_nobody_from_decode():
    """Those that came first need a prefill engine; a later turn needs decode alone."""
    lines = Lines(prefill=0, decode=1)
    split = lines.turn("split", PREFILL, DECODE)
    assert lines.turn("alone", DECODE).claim == "alone"
    later = lines.turn("later", DECODE)
    lines.frees(DECODE)
    assert (split.claim, later.claim) == (None, "later")


def test_whoever_steps_aside_keeps_its_place():
    """Two turns wait for decode and then for prefill: the first that came is the first served."""
    lines = Lines(prefill=0, decode=0)
    first, second = (lines.turn(name, PREFILL, DECODE) for name in ("first", "second"))
    alone = lines.turn("alone", DECODE)
    assert lines.frees(DECODE) == ["first", "second", "alone"]
    assert alone.claim == "alone"
    lines.frees(PREFILL)  # there is none to decode
    assert (first.claim, second.claim) == (None, None)
    last = lines.turn("last", DECODE)
    lines.frees(DECODE)
    assert (first.claim, second.claim, last.claim) == ("first", None, None)


def test_a_long_line_costs_each_that_waits_one_question_more():
    """Nobody is asked twice for what is known to be missing, however often room comes."""
    lines = Lines(prefill=0, decode=0)
    for number in range(8):
        lines.turn(f"{number}", PREFILL, DECODE)
    assert len(lines.frees(DECODE)) == 8  # each steps aside
    lines.left[DECODE] = 0
    assert lines.frees(PREFILL) == ["0"]
    lines.left[PREFILL] = 0
    assert lines.frees(DECODE) == ["0"]


def test_all_lines_together_are_bounded():
    """Ten places, whatever those in line wait for."""
    lines = Lines(prefill=0, decode=1)
    for number in range(5):
        lines.turn(f"{number}", PREFILL, DECODE)
    lines.turn("alone", DECODE)
    for number in range(5, 10):
        lines.turn(f"{number}", PREFILL, DECODE)
    assert len(lines.room) == 10
    for needs in ([DECODE], [PREFILL, DECODE]):
        with pytest.raises(NoPlace):
            lines.turn("too many", *needs)


async def test_turns_that_need_no_prefill_are_served_while_others_wait_for_it():
    """Prefill is full: an answer in two choices comes from decode, and so does a local turn."""
    lease = FakeLease()
    free = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await free.wait()
        await rig.prefill.prefill(seen, reply)

    flags = ("--max-inflight-per-engine=1", "--plan=local")
    async with router(*flags, decodes=2, lease=lease) as rig:
        rig.prefill.script(CHAT, play)
        split = [asyncio.create_task(rig.post(turn_body()))]
        await rig.prefill.turn(1)
        split.append(asyncio.create_task(rig.post(turn_body())))
        await rig.until(lambda: len(lease.begun) == 2)
        assert (await rig.post(turn_body(n=2))).status == 200
        lease.lease_id = "i.1.1"
        lease.http_address = next(one.url for one in rig.decodes if one.turns)
        assert (await rig.post(turn_body())).headers["x-kvturn-plan"] == "local"
        free.set()
        assert [answer.status for answer in await asyncio.gather(*split)] == [200, 200]
