"""A router's session with the lease service, from the router's side, over real streams."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from awake import within
from router_harness import FakeLease
from stub_engine import GUARD_S

from kvturn.clock import boottime_ns
from kvturn.lease_channels import LeaseChannels
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.choice.plan import Resolution
from kvturn_router.leases.router_session import AnnouncedEngine, RouterSession
from kvturn_router.leases.session_turns import Retained, SessionTurn, SessionTurns
from kvturn_router.leases.turn_report import report_message
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

KEY = ConversationKey("acme", "m", "c1")
POINTS = [b"p" * 16, b"q" * 16]
UNREACHABLE = Resolution(Verdict.LEASE_SERVICE_UNREACHABLE)


class Heard:
    """Keeps what a session says of engines."""

    def __init__(self) -> None:
        self.all: list[list[AnnouncedEngine]] = []
        self.changes: list[AnnouncedEngine] = []
        self.lost: list[str] = []

    def all_announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        self.all.append(list(engines))

    def announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        self.changes.extend(engines)

    def gone(self, engine_ids: Sequence[str]) -> None:
        self.lost.extend(engine_ids)


async def until(condition) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def session(
    *services: FakeLease, deadline_ms: int = 5000, heard: Heard | None = None, up: bool = True
) -> AsyncIterator[RouterSession]:
    """A session that knows these services, in that order, and is `up`; ends them too.

    It says itself when it is: a service has seen its hello before, also of one given up as late.
    """
    channels = LeaseChannels([service.address for service in services], boottime_ns)
    probes = asyncio.create_task(channels.run())
    one = RouterSession(
        channels,
        router_id="r1",
        question_deadline_ms=deadline_ms,
        listener=heard or Heard(),
        clock_ns=boottime_ns,
    )
    one.start()
    try:
        if up:
            await until(lambda: one.up)
        yield one
    finally:
        await one.stop()
        probes.cancel()
        await asyncio.gather(probes, return_exceptions=True)
        await channels.close()
        for service in services:
            await service.stop()


def begin(one: RouterSession, key: ConversationKey = KEY, *, reuse: bool = True) -> SessionTurn:
    return one.begin(key, POINTS, recognise=False, reuse=reuse)


async def until_verdict(one: RouterSession, verdict: Verdict) -> None:
    """Has turns begin until one is answered so, and in time: deadlines are short here."""
    async with asyncio.timeout(GUARD_S):
        while (await one.resolution(begin(one))).verdict is not verdict:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_turn_is_asked_answered_and_its_end_told():
    """All that the service says of a turn reaches it; all that it is told arrives."""
    fake = FakeLease(lease_id="i.1.1", http_address="http://d:1", longest_read_ms=1500)
    async with session(await fake.start()) as one:
        turn = one.begin(KEY, POINTS, recognise=True, reuse=True)
        assert await one.resolution(turn) == Resolution(
            None, "i.1.1", "http://d:1", 1500, conversation_id="c1", turn=1
        )
        assert (turn.conversation_id, turn.number) == ("c1", 1)
        report = TurnReport(1, Verdict.REUSED, 48, 40, 8, 1.5, 0.25, 4096)
        one.end(turn, retains=True, report=report)
        await fake.until(lambda: bool(fake.turns_ended))
        (begun,) = fake.begun
        assert begun.conversation == common_pb2.ConversationKey(
            tenant="acme", model="m", conversation_id="c1"
        )
        assert (list(begun.points), begun.recognise, begun.reuse) == (POINTS, True, True)
        assert begun.wait.ToMilliseconds() == 3000
        (ended,) = fake.turns_ended
        told = report_message("c1", report)
        assert ended == lease_pb2.EndTurn(turn_id=begun.turn_id, retains=True, report=told)
        assert fake.hellos == [lease_pb2.RouterHello(router_id="r1")]


async def test_turns_that_begin_together_go_out_together():
    """A hundred in one pass of the event loop: one message, and so do their ends."""
    async with session(fake := await FakeLease(verdict="NO_LEASE").start()) as one:
        turns = [begin(one) for _ in range(100)]
        answers = await asyncio.gather(*(one.resolution(turn) for turn in turns))
        assert {answer.verdict for answer in answers} == {Verdict.NO_LEASE}
        for turn in turns:
            one.end(turn)
        await fake.until(lambda: len(fake.turns_ended) == 100)
        assert fake.batches == 3


async def test_turns_that_begin_soon_after_a_message_share_the_next(monkeypatch):
    """Ten in as many passes of the event loop, right after one that was told at once."""
    monkeypatch.setattr("kvturn_router.leases.router_session._PACE_S", 0.2)
    async with session(fake := await FakeLease(verdict="NO_LEASE").start()) as one:
        await one.resolution(begin(one))
        batches = fake.batches
        turns = []
        for _ in range(10):
            turns.append(begin(one))
            await asyncio.sleep(0)
        await asyncio.gather(*(one.resolution(turn) for turn in turns))
        assert fake.batches == batches + 1


async def test_a_turn_with_reuse_off_is_told_and_never_waits():
    """It is in flight, and gets its number when the service has answered."""
    async with session(fake := await FakeLease(verdict="NO_LEASE").start()) as one:
        turn = begin(one, reuse=False)
        assert turn.resolution == Resolution(Verdict.TURNED_OFF)
        await until(lambda: turn.number)
        assert turn.resolution == Resolution(Verdict.TURNED_OFF)
        assert not fake.begun[0].reuse


async def test_an_answer_too_late_for_the_plan_still_names_the_conversation():
    """Past the deadline the turn goes on without reuse; later it learns who it is."""
    async with session(fake := await FakeLease(withholds=True).start(), deadline_ms=40) as one:
        turn = one.begin(KEY, POINTS, recognise=True, reuse=True)
        assert await one.resolution(turn) == UNREACHABLE
        await fake.until(lambda: bool(fake.begun))
        await fake.push(
            turns=[lease_pb2.TurnBegun(turn_id=turn.turn_id, conversation_id="c1~2", turn=7)]
        )
        await until(lambda: turn.number)
        assert (turn.conversation_id, turn.number) == ("c1~2", 7)
        assert turn.resolution == UNREACHABLE


async def test_after_one_missed_deadline_nobody_waits_until_there_is_a_word():
    """The second turn goes on at once, though it is told; any answer ends that."""
    async with session(fake := await FakeLease(withholds=True).start(), deadline_ms=40) as one:
        assert await one.resolution(begin(one)) == UNREACHABLE
        second = begin(one)
        assert second.resolution == UNREACHABLE
        await fake.until(lambda: len(fake.begun) == 2)
        fake.withholds = False
        third = begin(one)
        assert third.resolution == UNREACHABLE
        await until(lambda: third.number)
        fourth = begin(one)
        assert fourth.resolution is None
        await until_verdict(one, Verdict.FIRST_TURN)


async def test_a_service_that_froze_is_left_for_one_that_leads():
    """The leader's process stops without a word; the other one takes over."""
    frozen, other = await FakeLease().start(), await FakeLease(verdict="CONSUMED").start()
    other.standby = "NOT_LEADER"
    async with session(frozen, other, deadline_ms=40) as one:
        kept = begin(one)
        await one.resolution(kept)
        frozen.silent = True
        assert await one.resolution(begin(one)) == UNREACHABLE
        other.standby = ""
        await other.until(lambda: bool(other.hellos))
        # What is in flight is counted there again.
        assert kept.turn_id in [turn.turn_id for turn in other.hellos[0].turns_in_flight]
        await until_verdict(one, Verdict.CONSUMED)


async def test_a_session_moves_when_another_is_known_to_lead():
    """The one before has not noticed and holds its session; a call elsewhere has shown it."""
    first, second = await FakeLease().start(), await FakeLease(verdict="CONSUMED").start()
    async with session(first, second) as one:
        one.channels.leads(second.address)
        await second.until(lambda: bool(second.hellos))
        assert (await one.resolution(begin(one))).verdict is Verdict.CONSUMED
        await first.until(lambda: not first.sessions)


async def test_a_turn_asked_while_the_leader_changes_is_asked_again():
    """The service ends the session before it answers; its successor answers in time."""
    first, second = await FakeLease(withholds=True).start(), await FakeLease().start()
    second.verdict = "ENDED"
    async with session(first, second) as one:
        turn = begin(one)
        await first.until(lambda: bool(first.begun))
        await first.stop()
        assert (await one.resolution(turn)).verdict is Verdict.ENDED
        assert [again.turn_id for again in second.begun] == [turn.turn_id]
        assert not second.hellos[0].turns_in_flight


async def test_a_restarted_service_hears_of_turns_in_flight_under_their_final_names():
    """Recognised as c9 before: counted as c9 afterwards, not asked, and its end is told."""
    fake = await FakeLease(withholds=True).start()
    port = int(fake.address.rpartition(":")[2])
    async with session(fake) as one:
        before = len(fake.hellos)
        turn = one.begin(KEY, POINTS, recognise=True, reuse=True)
        await fake.until(lambda: bool(fake.begun))
        await fake.push(
            turns=[lease_pb2.TurnBegun(turn_id=turn.turn_id, conversation_id="c9", turn=2)]
        )
        await one.resolution(turn)
        await fake.stop()
        await fake.start(port)
        await fake.until(lambda: len(fake.hellos) > before)
        (counted,) = fake.hellos[before].turns_in_flight
        assert (counted.turn_id, counted.conversation.conversation_id) == (turn.turn_id, "c9")
        one.end(turn)
        await fake.until(lambda: bool(fake.turns_ended))
        assert len(fake.begun) == 1


async def test_the_leader_that_a_standby_names_is_gone_to():
    """The third of three leads: one attempt at the first, none at the second."""
    services = [await FakeLease().start() for _ in range(3)]
    first, second, third = services
    first.standby, first.leader = "NOT_LEADER", third.address
    async with session(*services) as one:
        assert (await one.resolution(begin(one))).verdict is Verdict.FIRST_TURN
        assert (len(second.hellos), len(third.hellos)) == (0, 1)


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("NOT_LEADER", Verdict.LEASE_SERVICE_UNREACHABLE),
        ("STORE_UNAVAILABLE", Verdict.STORE_UNAVAILABLE),
        ("SHUTTING_DOWN", Verdict.LEASE_SERVICE_UNREACHABLE),
    ],
)
async def test_without_a_leader_turns_go_on_at_once(reason, verdict):
    """Far within the deadline; and as soon as somebody leads, turns are asked about again."""
    services = [await FakeLease(standby=reason).start() for _ in range(2)]
    async with session(*services, up=False) as one:
        async with within(2):
            assert await one.resolution(begin(one)) == Resolution(verdict)
        # The second turn does not even wait for the next attempt.
        assert begin(one).resolution == Resolution(verdict)
        services[1].standby = ""
        await until(lambda: services[1].hellos)
        await until(lambda: begin(one).resolution is None)


async def test_sessions_that_end_at_once_follow_each_other_after_a_pause(monkeypatch):
    """A service that welcomes and ends, again and again, costs no more than one every pause."""
    monkeypatch.setattr("kvturn_router.leases.router_session._RECONNECT_S_MIN", 0.05)
    fake = FakeLease()
    welcome, began_s = fake._take, []

    async def welcome_and_end(request: lease_pb2.RouterSessionRequest, context: Any) -> None:
        began_s.append(time.monotonic())
        await welcome(request, context)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "ends")

    monkeypatch.setattr(fake, "_take", welcome_and_end)
    async with session(await fake.start(), up=False):
        await fake.until(lambda: len(fake.hellos) == 5)
        assert began_s[4] - began_s[0] > 4 * 0.05


async def test_nobody_listens_and_nothing_piles_up():
    """No service at all: turns go on at once and are forgotten when they end."""
    fake = await FakeLease().start()
    await fake.stop()
    async with session(fake, up=False) as one:
        async with within(2):
            assert await one.resolution(begin(one)) == UNREACHABLE
        for _ in range(1000):
            one.end(begin(one))
        assert len(one.turns) == 1


async def test_an_old_service_that_knows_no_sessions_is_unreachable():
    """Its gRPC server has no such method."""
    fake = FakeLease()

    async def unknown(request_iterator, context) -> None:
        await context.abort(12, "no such method")  # UNIMPLEMENTED

    fake.RouterSession = unknown  # type: ignore[method-assign]
    async with session(await fake.start(), up=False) as one:
        assert await one.resolution(begin(one)) == UNREACHABLE


async def test_a_turn_hears_of_its_retention_until_its_end():
    """Only the turn that it is about; one that has ended wants to hear nothing more."""
    async with session(fake := await FakeLease().start()) as one:
        heard: list[tuple[int, Retained]] = []
        turns = [
            one.begin(
                KEY,
                (),
                recognise=False,
                reuse=True,
                on_retained=lambda retained, i=i: heard.append((i, retained)),
            )
            for i in range(2)
        ]
        await one.resolution(turns[1])
        said = lease_pb2.TurnRetained(
            turn_id=turns[1].turn_id, token_count=64, prompt_tokens=48, local_cached_tokens=32
        )
        await fake.push(retained=[said, lease_pb2.TurnRetained(turn_id=99)])
        await until(lambda: heard)
        assert heard == [(1, Retained(64, 48, 32))]
        one.end(turns[1], retains=True)
        await fake.until(lambda: bool(fake.turns_ended))
        other = lease_pb2.TurnRetained(turn_id=turns[0].turn_id)
        await fake.push(retained=[said, other])
        await until(lambda: len(heard) > 1)
        assert heard[1:] == [(0, Retained(0, 0, 0))]


async def test_a_refused_turn_goes_on_without_reuse():
    """The service has no room for it; the turn is not held up."""
    async with session(fake := await FakeLease(withholds=True).start()) as one:
        turn = begin(one)
        await fake.until(lambda: bool(fake.begun))
        await fake.push(
            turns=[lease_pb2.TurnBegun(turn_id=turn.turn_id, refused="CONVERSATIONS_EXHAUSTED")]
        )
        assert await one.resolution(turn) == UNREACHABLE
        assert turn.conversation_id == "c1"


async def test_engines_are_heard_of_all_at_first_and_then_as_they_change():
    """One announced, one that comes, drains and goes."""

    def engine(engine_id: str, **members) -> lease_pb2.Engine:
        about = lease_pb2.EngineDescription(
            engine_id=engine_id,
            role=common_pb2.ENGINE_ROLE_DECODE,
            http_address=f"http://{engine_id}:1",
        )
        return lease_pb2.Engine(description=about, **members)

    fake, heard = FakeLease(engines=[engine("d1")]), Heard()
    async with session(await fake.start(), heard=heard):
        await until(lambda: heard.all)
        assert heard.all == [[AnnouncedEngine("d1", "decode", "http://d1:1", False)]]
        await fake.push(engines=[engine("d2"), engine("d2", draining=True)], engines_gone=["d1"])
        await until(lambda: heard.lost)
        assert [(one.engine_id, one.draining) for one in heard.changes] == [
            ("d2", False),
            ("d2", True),
        ]
        assert heard.lost == ["d1"]


async def test_a_client_that_leaves_while_its_turn_waits_costs_nothing():
    """The wait is cancelled; the answer that comes later finds nobody and harms nobody."""
    async with session(fake := await FakeLease(withholds=True).start()) as one:
        turn = begin(one)
        waiting = asyncio.create_task(one.resolution(turn))
        await fake.until(lambda: bool(fake.begun))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await fake.push(turns=[fake.answer_to(fake.begun[0])])
        fake.withholds = False
        assert (await one.resolution(begin(one))).verdict is Verdict.FIRST_TURN


def test_a_turn_that_ends_unanswered_is_no_sign_of_silence():
    """Its client left before it was told of, or before it was answered, which it never is then."""
    turns = SessionTurns(router_id="r1", question_deadline_ms=50)
    turns.open()
    turns.receive(lease_pb2.RouterSessionResponse(), 0)
    for told in (False, True):
        turn = turns.begin(KEY, POINTS, 1, recognise=False, reuse=True)
        assert turns.next_deadline_ns() is not None
        if told:
            turns.take()
        turns.end(turn, retains=False, report=None)
        assert turns.next_deadline_ns() is None
        assert turns.expire(10**9) is None
        assert turns.answering


async def test_the_last_ends_of_turns_are_told_before_the_session_ends(monkeypatch):
    """A turn ends just as the router stops, and its next one comes through another router."""
    monkeypatch.setattr("kvturn_router.leases.router_session._LAST_WORDS_S", GUARD_S)
    fake = await FakeLease().start()
    async with session(fake) as one:
        turn = begin(one)
        await one.resolution(turn)
        one.end(turn, retains=True)
    assert [(end.turn_id, end.retains) for end in fake.turns_ended] == [(turn.turn_id, True)]


async def test_a_frozen_service_does_not_keep_a_router_from_stopping():
    """It takes neither the last words nor the end of the stream."""
    fake = await FakeLease().start()
    async with session(fake) as one:
        await one.resolution(turn := begin(one))
        fake.silent = True
        one.end(turn)
        async with asyncio.timeout(GUARD_S):
            await one.stop()
        fake.silent = False
