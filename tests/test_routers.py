"""Routers' sessions against a model: whatever happens, turns are counted once and answered once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lessor_bench import Bench, Decode, key

from kvturn.recognition import Recognition
from kvturn_lease.routers import (
    GRANT_UNDERWAY_NS,
    Beginning,
    Begun,
    Retained,
    RouterLimits,
    Routers,
    RouterSession,
)

if TYPE_CHECKING:
    from kvturn_lease.conversation import ConversationKey

MS = 1_000_000
WAIT_NS = 50 * MS
SESSIONS = 3
NAMES = ("c", "d")
HISTORIES = tuple(bytes([number]) * 16 for number in range(4))


class RoutersMachine(RuleBasedStateMachine):
    """Routers that come, die and let turns run, and an engine that grants some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.engine = Decode(self.bench).up()
        limits = RouterLimits(sessions=SESSIONS, turns=4, waiting=2)
        self.routers = Routers(self.bench.lessor, Recognition(100), limits)
        self.sessions: list[RouterSession] = []
        self.next_id = 1
        self.in_flight: dict[int, tuple[RouterSession, ConversationKey | None]] = {}
        """By turn id, all different: its session, and its conversation once it was told."""
        self.unanswered: dict[int, int] = {}
        """By turn id: when its answer is due."""
        self.granted = 0

    def hear(self) -> None:
        """Takes what routers are told."""
        for session, news in self.routers.drain():
            if isinstance(news, Retained):
                assert session in self.sessions
            elif session in self.sessions:
                self.told(news)

    def told(self, begun: Begun) -> None:
        assert self.unanswered.pop(begun.turn_id, None) is not None, "answered twice"
        session, _ = self.in_flight[begun.turn_id]
        self.in_flight[begun.turn_id] = (session, key(begun.conversation_id))

    @precondition(lambda self: len(self.sessions) < SESSIONS)
    @rule(brought=st.integers(0, 2), name=st.sampled_from(NAMES))
    def open(self, brought: int, name: str) -> None:
        turns = []
        for _ in range(brought):
            turns.append(Beginning(self.next_id, key(name), False, HISTORIES[:1], 0, True))
            self.next_id += 1
        session = self.routers.open(turns, self.bench.now)
        self.sessions.append(session)
        self.in_flight.update((turn.turn_id, (session, turn.key)) for turn in turns)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        self.routers.close(session, self.bench.now)
        for turn_id, (owner, _) in list(self.in_flight.items()):
            if owner is session:
                del self.in_flight[turn_id]
                self.unanswered.pop(turn_id, None)
        self.hear()

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        name=st.sampled_from(NAMES),
        points=st.lists(st.sampled_from(HISTORIES), max_size=3),
        recognise=st.booleans(),
        waits=st.booleans(),
        reuse=st.booleans(),
    )
    def begin(
        self,
        data: st.DataObject,
        name: str,
        points: list[bytes],
        recognise: bool,
        waits: bool,
        reuse: bool,
    ) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        turn_id, self.next_id = self.next_id, self.next_id + 1
        wait_ns = WAIT_NS if waits else 0
        told = Beginning(turn_id, key(name), recognise, points, wait_ns, reuse)
        begun = self.routers.begin(session, told, self.bench.now)
        if begun is not None and begun.refused:
            assert len([each for each, _ in self.in_flight.values() if each is session]) >= 4
            return
        self.in_flight[turn_id] = (session, None)
        self.unanswered[turn_id] = self.bench.now + wait_ns
        if begun is None:
            assert waits
            assert reuse
        else:
            assert (begun.resolution is not None) == reuse
            self.told(begun)
        self.hear()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), retains=st.booleans())
    def end(self, data: st.DataObject, retains: bool) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        session, _ = self.in_flight.pop(turn_id)
        self.unanswered.pop(turn_id, None)
        assert self.routers.end(session, turn_id, retains, self.bench.now) is not None
        assert self.routers.end(session, turn_id, retains, self.bench.now) is None
        self.hear()

    @rule(name=st.sampled_from(NAMES), turn=st.integers(0, 8), history=st.sampled_from(HISTORIES))
    def grant(self, name: str, turn: int, history: bytes) -> None:
        self.granted += 1
        retention = self.engine.retention(self.granted, name, turn=turn)
        self.engine.grant(self.granted, name, turn=turn)
        self.routers.announced(replace(retention, history=history), True, self.bench.now)
        self.hear()

    @rule(span_ms=st.sampled_from((1, 49, 50, 1_000)))
    def wait(self, span_ms: int) -> None:
        self.bench.wait(span_ms * MS, self.engine)
        due_ns = self.routers.next_deadline_ns()
        if due_ns is not None and due_ns <= self.bench.now:
            self.routers.expire(self.bench.now)
        self.hear()

    @rule(name=st.sampled_from(NAMES))
    def end_conversation(self, name: str) -> None:
        self.routers.end_conversation(key(name), self.bench.now)
        self.hear()

    @invariant()
    def all_are_answered_in_time(self) -> None:
        assert all(due_ns > self.bench.now for due_ns in self.unanswered.values())

    @invariant()
    def each_turn_counts_once_in_its_conversation(self) -> None:
        known = [name for _, name in self.in_flight.values() if name is not None]
        for name in set(known):
            conversation = self.bench.lessor._conversations.get(name)
            assert conversation is not None
            waiting = len(self.unanswered)
            counted = conversation.turns_in_flight
            assert known.count(name) <= counted <= known.count(name) + waiting

    def teardown(self) -> None:
        """When all routers are gone nothing is left of them."""
        for session in self.sessions:
            self.routers.close(session, self.bench.now)
        self.bench.wait(GRANT_UNDERWAY_NS, self.engine)
        self.routers.expire(self.bench.now)
        assert self.routers._lines == {}
        assert self.routers.next_deadline_ns() is None
        for conversation in self.bench.lessor._conversations._dormant.values():
            assert conversation.turns_in_flight == 0


RoutersMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRouters = RoutersMachine.TestCase
