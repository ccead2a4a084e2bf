"""A lessor with hand-made time, and engines that keep to the contract."""

from __future__ import annotations

from kvturn_lease.config import LessorConfig, stretched_ns
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import (
    Announced,
    EndSession,
    GrantRefused,
    Record,
    Release,
    SendToEngine,
)
from kvturn_lease.lease import LeaseId, Retention
from kvturn_lease.lessor import Lessor
from kvturn_lease.session import EngineInfo, KvMemory, SessionId
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

S = 1_000_000_000
TTL, R = 4 * S, 2 * S
CONFIG = LessorConfig(
    session_ttl_ns=TTL, heartbeat_ns=S, longest_read_ns=R, idle_ns=60 * S, max_hold_ns=480 * S
)
READER_BOUND = stretched_ns(R)
INHERIT_BOUND = stretched_ns(TTL + R)
TERM = 7


def key(name: str = "c") -> ConversationKey:
    return ConversationKey("tenant", "model", name)


class Bench:
    """A lessor, its clock and its messages."""

    def __init__(self, config: LessorConfig = CONFIG, term: int = TERM) -> None:
        self.lessor = Lessor(config, term)
        self.now = 1_000 * S
        self.engines: list[Decode] = []
        self.ended: list[EndSession] = []
        self.records: list[object] = []
        self.announced: list[ConversationKey] = []

    def carry_out(self) -> None:
        for effect in self.lessor.drain():
            match effect:
                case SendToEngine(session=session_id):
                    for engine in self.engines:
                        if engine.session_id == session_id:
                            engine.received.append(effect)
                case EndSession():
                    self.ended.append(effect)
                case Record(change=change):
                    self.records.append(change)
                case Announced(retention=retention):
                    self.announced.append(retention.conversation)

    def wait(self, span_ns: int, *beating: Decode) -> None:
        """Lets time pass; the lessor is woken when it asked to be, `beating` engines beat."""
        end = self.now + span_ns
        wakes = 0
        while True:
            wakes += 1
            assert wakes < 100_000, "the lessor asks to be woken without end"
            stops = [end] + [engine.beat_ns + S for engine in beating]
            due = self.lessor.next_deadline_ns()
            if due is not None:
                stops.append(max(due, self.now))
            self.now = min(stops)
            if due is not None and due <= self.now:
                self.lessor.expire(self.now)
                self.carry_out()
            for engine in beating:
                if engine.beat_ns + S <= self.now:
                    engine.beat()
            if self.now == end and (due is None or due > end):
                return

    def resolve(self, name: str = "c") -> Verdict:
        verdict = self.lessor.resolve(key(name), self.now).verdict
        self.carry_out()
        return verdict

    def begin(self, lease_id: LeaseId, name: str = "c") -> Verdict:
        answer = self.lessor.begin_read(lease_id, key(name), self.now)
        self.carry_out()
        assert (answer.verdict == Verdict.NONE) == bool(answer.payload)
        return answer.verdict

    def end_read(self, lease_id: LeaseId, outcome: ReadOutcome = ReadOutcome.COMPLETED) -> None:
        self.lessor.end_read(lease_id, outcome, self.now)
        self.carry_out()

    def touch(self, delta: int, name: str = "c") -> None:
        self.lessor.touch(key(name), delta, self.now)
        self.carry_out()

    def end_conversation(self, name: str = "c") -> int:
        ended = self.lessor.end_conversation(key(name), self.now)
        self.carry_out()
        return ended


class Decode:
    """A decode engine with one session at a time."""

    def __init__(self, bench: Bench, name: str = "d1", incarnation: str = "") -> None:
        self.bench = bench
        self.name = name
        self.incarnation = incarnation or f"inc-{name}"
        self.number = 0
        self.sequence = 0
        self.beat_ns = 0
        self.retains = True
        self.received: list[SendToEngine] = []
        bench.engines.append(self)

    @property
    def session_id(self) -> SessionId:
        return SessionId(self.name, self.incarnation, self.number)

    def lease_id(self, number: int) -> LeaseId:
        return LeaseId(self.incarnation, number, self.number)

    def retention(
        self,
        number: int,
        name: str = "c",
        *,
        turn: int = 0,
        tokens: int = 64,
        blocks: int = 4,
    ) -> Retention:
        payload = f"blocks of {number}".encode()
        return Retention(self.lease_id(number), key(name), tokens, blocks, turn, payload)

    def register(
        self,
        *inventory: tuple[int, str] | Retention,
        quiet_ns: int | None = None,
        hold_ns: int = 0,
        previous_term: int = 0,
    ) -> None:
        """Opens the next session with the retentions (number, conversation) given."""
        self.number += 1
        self.sequence = 1
        self.received.clear()
        retentions = [
            item if isinstance(item, Retention) else self.retention(item[0], item[1])
            for item in inventory
        ]
        try:
            self.bench.lessor.register(
                self.session_id,
                EngineInfo(f"http://{self.name}", self.retains, b"about", b"nixl"),
                retentions,
                quiet_ns=quiet_ns,
                hold_ns=hold_ns,
                previous_term=previous_term,
                now_ns=self.bench.now,
            )
        finally:
            self.bench.carry_out()

    def up(self, *inventory: tuple[int, str], previous_term: int = 0) -> Decode:
        """Registers and proves it with a first heartbeat."""
        quiet_ns = 0 if inventory else None
        self.register(*inventory, quiet_ns=quiet_ns, previous_term=previous_term)
        self.beat()
        return self

    def beat(
        self,
        *withdrawn: tuple[int, ReleaseReason],
        echo: int | None = None,
        term: int | None = None,
    ) -> None:
        """Heartbeats, echoing the last message received unless told otherwise."""
        self.sequence += 1
        self.beat_ns = self.bench.now
        last = self.received[-1].sequence if self.received else 0
        try:
            self.bench.lessor.heartbeat(
                self.session_id,
                self.sequence,
                echo_term=self.bench.lessor.term if term is None else term,
                echo_sequence=last if echo is None else echo,
                withdrawn=[(self.lease_id(number), reason) for number, reason in withdrawn],
                memory=KvMemory(100, 60, 30),
                now_ns=self.bench.now,
            )
        finally:
            self.bench.carry_out()

    def grant(self, number: int, name: str = "c", **more: int) -> LeaseId:
        self.sequence += 1
        retention = self.retention(number, name, **more)
        try:
            self.bench.lessor.grant(self.session_id, self.sequence, retention, self.bench.now)
        finally:
            self.bench.carry_out()
        return retention.lease_id

    def freed(self, number: int, reason: ReleaseReason = ReleaseReason.CONSUMED) -> None:
        self.sequence += 1
        self.bench.lessor.freed(
            self.session_id, self.sequence, self.lease_id(number), reason, self.bench.now
        )
        self.bench.carry_out()

    def drop_stream(self) -> None:
        self.bench.lessor.close_session(self.session_id, self.bench.now)
        self.bench.carry_out()

    def releases(self) -> list[tuple[int, ReleaseReason]]:
        """Returns the releases of this session so far."""
        messages = [effect.message for effect in self.received]
        return [
            (message.lease_id.number, message.reason)
            for message in messages
            if isinstance(message, Release)
        ]

    def refusals(self) -> list[tuple[int, str]]:
        messages = [effect.message for effect in self.received]
        return [
            (message.lease_id.number, message.reason)
            for message in messages
            if isinstance(message, GrantRefused)
        ]
