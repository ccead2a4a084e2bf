"""A state machine drives the lessor at random and compares it with a model of plain dicts.

The model knows what really happens: which engine holds which blocks, who reads them, when each
message was sent. It knows nothing of the lessor's states. Checked after every message:

- a lease id, and the retention behind it, is granted to one reader at most in a term;
- no release is sent, and no read granted, while a reader may read, also one of an earlier term;
- no read is granted but under the trusted, current session;
- no read is granted of what has ended;
- once faults stop, every retention is released in bounded time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvturn_lease.config import LessorConfig, stretched_ns
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import EndSession, GrantRefused, Registered, Release, SendToEngine
from kvturn_lease.errors import LeaseNotFound, LeaseServiceError
from kvturn_lease.lease import LeaseId, LeaseState, Retention
from kvturn_lease.lessor import Lessor
from kvturn_lease.session import EngineInfo, SessionId
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

S = 1_000_000_000
TTL, R, HEARTBEAT = 4 * S, 2 * S, S
CONFIG = LessorConfig(
    session_ttl_ns=TTL,
    heartbeat_ns=HEARTBEAT,
    longest_read_ns=R,
    idle_ns=8 * S,
    max_hold_ns=20 * S,
    leases_per_engine_max=6,
    leases_max=9,
    conversations_max=8,
)
HOLD_AFTER_VOUCH = stretched_ns(TTL + R)
ENGINES = ("d1", "d2")
CONVERSATIONS = tuple(ConversationKey("", "m", f"c{number}") for number in range(2))

engines = st.sampled_from(ENGINES)
conversations = st.sampled_from(CONVERSATIONS)
short_spans = st.sampled_from((1, S // 10, S // 2, S, R, TTL // 2))
long_spans = st.sampled_from((TTL - 1, TTL, 7 * S, 25 * S))
seldom = st.sampled_from((False, False, False, False, False, True))
Block = tuple[str, int]
"""Names a retention: incarnation and number."""


@dataclass
class Decode:
    """What one engine holds and has heard."""

    name: str
    incarnation: str
    number: int = 0
    sequence: int = 0
    is_open: bool = False
    heard_term: int = 0
    heard_sequence: int = 0
    previous_term: int = 0
    retained: int = 0
    held: dict[int, ConversationKey] = field(default_factory=dict)
    vouched_ns: dict[int, int] = field(default_factory=dict)
    withdrawn: dict[int, tuple[ReleaseReason, int]] = field(default_factory=dict)
    """Given up, why, and in which session."""
    last_vouched_ns: int | None = None

    @property
    def session(self) -> SessionId:
        return SessionId(self.name, self.incarnation, self.number)

    def vouch(self, now_ns: int) -> None:
        for number in self.held:
            if number not in self.withdrawn:
                self.vouched_ns[number] = now_ns
                self.last_vouched_ns = now_ns


class LessorMachine(RuleBasedStateMachine):
    """Random engines, readers, routers, failovers and time against one lessor."""

    @initialize()
    def begin(self) -> None:
        self.now = 1_000 * S
        self.term = 1
        self.incarnations = 0
        self.lessor = Lessor(CONFIG, self.term)
        self.decodes = {name: Decode(name, self.new_incarnation()) for name in ENGINES}
        # The model.
        self.sent_ns: dict[SessionId, dict[int, int]] = {}
        self.trusted_until: dict[SessionId, int] = {}
        self.granted: set[LeaseId] = set()
        self.granted_blocks: set[tuple[int, Block]] = set()
        self.readers: dict[Block, tuple[int, int, LeaseId]] = {}  # (term, since when, as what)
        self.ended: set[Block] = set()
        self.offers: dict[ConversationKey, LeaseId] = {}
        for name in ENGINES:
            self.connect(name, prompt=True)

    def new_incarnation(self) -> str:
        self.incarnations += 1
        return f"i{self.incarnations}"

    # ---- the world ---------------------------------------------------------------------------

    def carry_out(self) -> None:
        for effect in self.lessor.drain():
            if isinstance(effect, EndSession):
                decode = self.decodes[effect.session.engine_id]
                if decode.session == effect.session:
                    decode.is_open = False
            elif isinstance(effect, SendToEngine):
                self.deliver(effect)

        self.check_census()

    def check_census(self) -> None:
        """What is counted as leases come and go is what a look at all of them finds."""
        states = Counter(
            lease.state for engine in self.lessor._engines.all() for lease in engine.leases.values()
        )
        census = self.lessor.census()
        assert census.active == states[LeaseState.ACTIVE]
        assert census.reading == states[LeaseState.READING]
        assert census.ending == states[LeaseState.ENDING]

    def deliver(self, effect: SendToEngine) -> None:
        sent = self.sent_ns.setdefault(effect.session, {})
        assert effect.sequence == len(sent) + 1
        sent[effect.sequence] = self.now
        message = effect.message
        decode = self.decodes[effect.session.engine_id]
        if isinstance(message, Release):
            assert message.lease_id.session_number == effect.session.number
            block = (message.lease_id.incarnation, message.lease_id.number)
            self.check_nobody_reads(block)
            self.ended.add(block)
        if decode.session != effect.session or not decode.is_open:
            return  # the stream was cut: the message is lost
        decode.heard_term, decode.heard_sequence = self.term, effect.sequence
        if isinstance(message, Registered):
            decode.previous_term = self.term
        if isinstance(message, Release | GrantRefused):
            self.free(decode, message.lease_id.number)

    def check_nobody_reads(self, block: Block) -> None:
        if block not in self.readers:
            return
        term, granted_ns, _ = self.readers[block]
        # Our own term's grants bind until K*R; a reader never uses anything later than R.
        bound_ns = stretched_ns(R) if term == self.term else R
        assert self.now >= granted_ns + bound_ns, f"{block} is being read"

    def free(self, decode: Decode, number: int) -> None:
        block = (decode.incarnation, number)
        if number in decode.held and block in self.readers:
            _, granted_ns, _ = self.readers[block]
            assert self.now >= granted_ns + R, f"{block} was freed under its reader"
        decode.held.pop(number, None)
        decode.withdrawn.pop(number, None)

    def call(self, decode: Decode, send: object) -> None:
        """Sends a message on the engine's stream; an error ends the stream."""
        try:
            send()  # type: ignore[operator]
        except LeaseServiceError:
            self.carry_out()
            self.cut(decode)
        self.carry_out()

    def cut(self, decode: Decode) -> None:
        if decode.is_open:
            decode.is_open = False
            self.lessor.close_session(decode.session, self.now)

    # ---- engines -----------------------------------------------------------------------------

    @rule(name=engines, prompt=st.booleans())
    def connect(self, name: str, prompt: bool) -> None:
        """Registers and, unless something comes between, heartbeats at once."""
        self.register(name)
        if prompt:
            self.heartbeat(name, late=False)

    def register(self, name: str) -> None:
        decode = self.decodes[name]
        quiet_ns = None if decode.last_vouched_ns is None else self.now - decode.last_vouched_ns
        old = decode.session
        decode.number += 1
        decode.sequence, decode.heard_sequence, decode.is_open = 1, 0, True
        inventory = [
            self.retention(decode, number)
            for number in decode.held
            if number not in decode.withdrawn
        ]
        decode.vouch(self.now)

        def send() -> None:
            self.lessor.register(
                decode.session,
                EngineInfo("", True, b"", b""),
                inventory,
                quiet_ns=quiet_ns,
                previous_term=decode.previous_term,
                now_ns=self.now,
            )

        self.call(decode, send)
        self.lessor.close_session(old, self.now)  # its stream's end is noticed late

    def retention(self, decode: Decode, number: int) -> Retention:
        lease_id = LeaseId(decode.incarnation, number, decode.number)
        return Retention(lease_id, decode.held[number], 64, 4, 0, b"payload")

    @rule(name=engines, late=st.booleans())
    def heartbeat(self, name: str, late: bool) -> None:
        """`late` echoes an older message than the last."""
        decode = self.decodes[name]
        if not decode.is_open:
            return
        echo = max(0, decode.heard_sequence - (1 if late else 0))
        decode.vouch(self.now)
        decode.sequence += 1
        alive_before = self.now < self.trusted_until.get(
            decode.session, self.sent_ns[decode.session][1] + TTL
        )
        withdrawn = [
            (LeaseId(decode.incarnation, number, decode.number), reason)
            for number, (reason, session_number) in decode.withdrawn.items()
            if session_number == decode.number
        ]

        def send() -> None:
            self.lessor.heartbeat(
                decode.session,
                decode.sequence,
                echo_term=decode.heard_term,
                echo_sequence=echo,
                withdrawn=withdrawn,
                memory=None,
                now_ns=self.now,
            )

        if alive_before and decode.heard_term == self.term and echo:
            until = self.sent_ns[decode.session][echo] + TTL
            known = self.trusted_until.get(decode.session, 0)
            self.trusted_until[decode.session] = max(known, until)
        self.call(decode, send)

    @rule(name=engines, key=conversations)
    def grant(self, name: str, key: ConversationKey) -> None:
        decode = self.decodes[name]
        decode.retained += 1
        number = decode.retained
        decode.held[number] = key
        if not decode.is_open:
            return
        decode.vouched_ns[number] = self.now
        decode.last_vouched_ns = self.now
        decode.sequence += 1
        retention = self.retention(decode, number)
        self.call(
            decode,
            lambda: self.lessor.grant(decode.session, decode.sequence, retention, self.now),
        )

    @rule(name=engines, reason=st.sampled_from([ReleaseReason.PRESSURE, ReleaseReason.EXPIRED]))
    def withdraw(self, name: str, reason: ReleaseReason) -> None:
        decode = self.decodes[name]
        number = next((each for each in decode.held if each not in decode.withdrawn), None)
        if number is None:
            return
        decode.withdrawn[number] = (reason, decode.number if decode.is_open else 0)
        if decode.is_open:
            self.heartbeat(name, late=False)
            self.ended.add((decode.incarnation, number))

    @rule(name=engines, really=seldom)
    def lose_stream(self, name: str, really: bool) -> None:
        if not really:
            return
        self.cut(self.decodes[name])
        self.carry_out()

    @rule(name=engines, really=seldom)
    def go_silent(self, name: str, really: bool) -> None:
        """The stream is gone, but only the engine knows."""
        if really:
            self.decodes[name].is_open = False

    @rule(name=engines, really=seldom)
    def restart(self, name: str, really: bool) -> None:
        if not really:
            return
        self.decodes[name] = Decode(name, self.new_incarnation())

    @rule(really=seldom)
    def fail_over(self, really: bool) -> None:
        """A new lessor knows nothing; engines lose their streams."""
        if not really:
            return
        self.term += 1
        self.lessor = Lessor(CONFIG, self.term)
        self.sent_ns.clear()
        self.trusted_until.clear()
        self.ended.clear()
        for decode in self.decodes.values():
            decode.is_open = False

    # ---- readers and routers -----------------------------------------------------------------

    @rule(key=conversations)
    def resolve(self, key: ConversationKey) -> None:
        resolution = self.lessor.resolve(key, self.now)
        assert (resolution.lease_id is None) == (resolution.verdict != Verdict.NONE)
        if resolution.lease_id is not None:
            self.offers[key] = resolution.lease_id
        self.carry_out()

    @rule(key=conversations)
    def begin_read(self, key: ConversationKey) -> None:
        """Asks for what was offered last, maybe long ago."""
        if key in self.offers:
            self.ask(self.offers[key], key)

    @rule(name=engines, key=conversations)
    def serve_a_turn(self, name: str, key: ConversationKey) -> None:
        """What mostly happens: the last turn is read, and this one is granted."""
        self.resolve_and_begin_read(key)
        self.grant(name, key)

    @rule(key=conversations)
    def resolve_and_begin_read(self, key: ConversationKey) -> None:
        """What is offered now is granted now."""
        self.resolve(key)
        resolution = self.lessor.resolve(key, self.now)
        self.carry_out()
        if resolution.lease_id is not None:
            assert self.ask(resolution.lease_id, key) == Verdict.NONE

    def ask(self, lease_id: LeaseId, key: ConversationKey) -> Verdict:
        answer = self.lessor.begin_read(lease_id, key, self.now)
        self.carry_out()
        if answer.verdict == Verdict.NONE:
            self.check_grant(lease_id, key)
        return answer.verdict

    def check_grant(self, lease_id: LeaseId, key: ConversationKey) -> None:
        block = (lease_id.incarnation, lease_id.number)
        assert lease_id not in self.granted, f"{lease_id} was granted twice"
        assert (self.term, block) not in self.granted_blocks, f"{block} was granted twice"
        assert block not in self.ended, f"{block} has ended"
        self.check_nobody_reads(block)
        holder = next(
            session
            for session in self.sent_ns
            if (session.incarnation, session.number)
            == (lease_id.incarnation, lease_id.session_number)
        )
        assert self.now < self.trusted_until.get(holder, 0), "the session is not trusted"
        newest = max(each.number for each in self.sent_ns if each[:2] == holder[:2])
        assert holder.number == newest, "the session was replaced"
        decode = self.decodes[holder.engine_id]
        if decode.session == holder and decode.is_open:
            assert decode.held.get(lease_id.number) == key, f"{block} is not held"
        self.granted.add(lease_id)
        self.granted_blocks.add((self.term, block))
        self.readers[block] = (self.term, self.now, lease_id)

    @rule(outcome=st.sampled_from(list(ReadOutcome)), pick=st.integers(0, 9))
    def end_read(self, outcome: ReadOutcome, pick: int) -> None:
        """The reader is done: its engine gets the notice if it read all, the lessor EndRead."""
        mine = [block for block, (term, _, _) in self.readers.items() if term == self.term]
        if not mine:
            return
        block = mine[pick % len(mine)]
        _, _, named = self.readers.pop(block)
        if outcome == ReadOutcome.COMPLETED:
            self.notify(named)
        self.ended.add(block)
        self.lessor.end_read(named, outcome, self.now)
        self.carry_out()

    def notify(self, lease_id: LeaseId) -> None:
        """A notice frees the blocks if it names their lease id of now."""
        for decode in self.decodes.values():
            current = (decode.incarnation, decode.number)
            if current != (lease_id.incarnation, lease_id.session_number):
                continue
            if decode.held.pop(lease_id.number, None) is None:
                continue
            decode.withdrawn.pop(lease_id.number, None)
            if decode.is_open:
                decode.sequence += 1
                sequence = decode.sequence
                self.call(
                    decode,
                    lambda decode=decode, sequence=sequence: self.lessor.freed(
                        decode.session, sequence, lease_id, ReleaseReason.CONSUMED, self.now
                    ),
                )

    @rule(key=conversations, delta=st.sampled_from([-1, 0, 1]))
    def touch(self, key: ConversationKey, delta: int) -> None:
        self.lessor.touch(key, delta, self.now)
        self.carry_out()

    @rule(key=conversations, really=seldom)
    def end_conversation(self, key: ConversationKey, really: bool) -> None:
        if not really:
            return
        resolution = self.lessor.resolve(key, self.now)
        self.lessor.end_conversation(key, self.now)
        if resolution.lease_id is not None:
            self.ended.add(resolution.lease_id[:2])
        self.carry_out()

    @rule(key=conversations, really=seldom)
    def revoke(self, key: ConversationKey, really: bool) -> None:
        if not really or key not in self.offers:
            return
        try:
            self.lessor.revoke(self.offers[key], self.now)
        except LeaseNotFound:
            pass
        else:
            self.ended.add(self.offers[key][:2])
        self.carry_out()

    # ---- time --------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 8))
    def pass_time_in_health(self, steps: int) -> None:
        """Time passes as it mostly does: with heartbeats."""
        for _ in range(steps):
            self.pass_time(HEARTBEAT, punctual=True)
            for name in ENGINES:
                self.heartbeat(name, late=False)

    @rule(span_ns=long_spans, punctual=st.booleans(), really=seldom)
    def pass_much_time(self, span_ns: int, punctual: bool, really: bool) -> None:
        """Longer than sessions live."""
        if really:
            self.pass_time(span_ns, punctual)

    @rule(span_ns=short_spans, punctual=st.booleans())
    def pass_time(self, span_ns: int, punctual: bool) -> None:
        """A lessor that is not woken in time must be as right as one that is."""
        end = self.now + span_ns
        wakes = 0
        while punctual:
            due = self.lessor.next_deadline_ns()
            if due is None or due > end:
                break
            wakes += 1
            assert wakes < 10_000, "the lessor asks to be woken without end"
            self.now = max(self.now, due)
            self.lessor.expire(self.now)
            self.carry_out()
        self.now = end
        for decode in self.decodes.values():
            self.free_unvouched(decode)

    def free_unvouched(self, decode: Decode) -> None:
        for number in list(decode.held):
            vouched_ns = decode.vouched_ns.get(number)
            if vouched_ns is None and number in decode.withdrawn:
                self.free(decode, number)  # nobody ever heard of it
            elif vouched_ns is not None and self.now >= vouched_ns + HOLD_AFTER_VOUCH:
                self.free(decode, number)

    # ---- once faults stop --------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "lessor"):
            return
        for name in ENGINES:
            self.register(name)
        for key in CONVERSATIONS:
            for _ in range(100):
                self.lessor.touch(key, -1, self.now)
        end = self.now + CONFIG.max_hold_ns + 2 * HOLD_AFTER_VOUCH + 2 * TTL
        while self.now < end:
            for name in ENGINES:
                self.heartbeat(name, late=False)
            self.pass_time(HEARTBEAT, punctual=True)
        for decode in self.decodes.values():
            assert decode.is_open, "a healthy session was ended"
            assert not decode.held, f"{decode.name} still holds {decode.held}"
        assert self.lessor._lease_count == 0
        assert (
            self.lessor.list_leases(engine_id="", key=None, after="", count_max=10, now_ns=self.now)
            == []
        )


TestLessorModel = LessorMachine.TestCase
TestLessorModel.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
