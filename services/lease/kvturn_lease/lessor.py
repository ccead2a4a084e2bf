"""The lessor: grants leases on KV that decode engines retain, and says who may read it.

Theory of operation
-------------------
The core does no I/O and has no clock. Every method takes `now_ns`, the shell's CLOCK_BOOTTIME
read *after* the event it judges, and never less than before. What has to be done is left in
`drain()`; when to call `expire()` is told by `next_deadline_ns()`. Correctness never hangs on
`expire()` being on time: each method looks at the deadlines it depends on first.

An *engine* (session.py) registers under a session (engine id, incarnation, number) and brings
all that it retains. A newer session fences the older one; a new incarnation takes the old one's
place and, once it has echoed a message, fences it for ever: a Register may be on its way for longer
than its process lives. The *lessor's term* is new with each process: state of another term is
unknown to it.

A *lease* (lease.py) goes ACTIVE -> READING -> ENDING -> gone, or ACTIVE -> ENDING -> gone:

  ACTIVE   `begin_read` may be granted, once, while its session is trusted and no inherit wait runs
  READING  it was granted; nobody else gets it; `end_read` or K*R later it ends
  ENDING   it ended for a reason that `resolve` tells; a reader may remain
  gone     `Release` was sent: only once no longer granted, no reader remains (`end_read`, or
           K*R after the grant) and no inherit wait runs. Then the engine may reuse the blocks.

Trust (lease rules 4 and 5): a session is trusted until TTL after the lessor *sent* the last
message that the engine echoed. The deadline is looked at before a message is applied; past it
the session is dead for ever. A session that has echoed nothing yet grants nothing.

Inherit wait (rule 7): a lease that a Register brings and this term did not grant may be being
read under a grant of an earlier term. Such a grant was given while that term trusted the
engine, at most TTL after the engine last vouched, and its read ends R after. So for
K*(TTL + R) - quiet after the Register the lease is neither granted nor confirmed as released,
TTL and R being the longest of any term: the engine tells that hold, in case it was shortened.
If the engine's previous session was with this same term, nothing is unknown and nothing waits.

Once (rule 6): a lease is granted to one reader, ever. What an engine's next session brings again
is found by (incarnation, retention number) and stays begun, ended, or waiting as it was. For
that the leases of an engine that went away are kept for a while (`away_memory_ns`).

Leadership: one Lessor is one term. Where several processes share a store, the shell says until
when this one leads (`lead_until`); past that, or when told (`depose`), it ends all sessions and
says nothing ever again but NotLeader: the next leader must not wait for a reader that it let in.

A *conversation* (conversation.py) has at most one lease that has not ended: the newest grant
supersedes the others, on whatever engine. It is idle when no turn is in flight and its last
sign of life is over; the policy says whether its lease ends then. At the longest hold it does.
Acknowledged heartbeats tell each engine what its leases' conversations do (`Outlook`), so that
it knows what to give up first when it needs memory. Conversations outlive their
leases, in a bounded memory, because a turn that finds no lease is owed the reason.

Costs: nothing here walks over all leases; the death of an engine costs what it holds. A search of
conversations copies their list and leaves the walk, in steps, to its caller.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvturn_lease.census import Census, Holding
from kvturn_lease.config import Policy
from kvturn_lease.conversation import (
    TURN_MAX,
    TURNS_IN_FLIGHT_MAX,
    Conversation,
    ConversationKey,
    Conversations,
    ConversationView,
)
from kvturn_lease.conversation_search import ConversationSearch, Wanted
from kvturn_lease.deadline_queue import NEVER_NS, DeadlineQueue
from kvturn_lease.effects import (
    Announced,
    Effect,
    EndSession,
    EngineChanged,
    EngineMessage,
    GrantRefused,
    HeartbeatAck,
    Record,
    Registered,
    Release,
    SendToEngine,
)
from kvturn_lease.engines import Engines
from kvturn_lease.errors import (
    ConversationNotFound,
    EngineNotFound,
    InvalidArgument,
    LeaseNotFound,
    LeaseServiceError,
    NotLeader,
    SequenceGap,
    SessionExpired,
    SessionFenced,
)
from kvturn_lease.lease import Lease, LeaseId, LeaseState, LeaseView, Outlook, Retention
from kvturn_lease.session import Engine, EngineInfo, EngineView, KvMemory, Session, SessionId
from kvturn_lease.store import (
    ConversationChanged,
    ConversationForgotten,
    ConversationRecord,
    EngineForgotten,
    SessionClosed,
    SessionKept,
    SessionOpened,
    SessionRecord,
    Snapshot,
)
from kvturn_lease.tally import Tally
from kvturn_lease.usage import Tenants
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict, verdict_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvturn_lease.config import LessorConfig


OVERDUE_READS_MAX = 10_000
"""Reads past their bound that nobody has said to be over; the oldest are forgotten."""

_ENDS_OF_TIME = (ReleaseReason.IDLE, ReleaseReason.EXPIRED)


@dataclass(frozen=True, slots=True)
class Resolution:
    """Who holds a conversation: a lease to read, or the verdict that says why there is none."""

    lease_id: LeaseId | None
    verdict: Verdict
    engine_id: str
    http_address: str
    token_count: int
    prompt_tokens: int = 0
    """Tokens of the prompt of the turn that left the lease; 0 when not known."""
    history: bytes = b""
    """Digest of the history that turn was asked with; empty when not known."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Answer to BeginRead: granted if and only if `verdict` is NONE."""

    verdict: Verdict
    payload: bytes = b""
    nixl: bytes = b""


class Lessor:
    """Owner of all leases. Not safe for threads; one event loop calls it."""

    def __init__(
        self,
        config: LessorConfig,
        term: int,
        term_ends_ns: int | None = None,
        tally: Tally | None = None,
    ) -> None:
        """`term` is random, 1 to 2**64 - 1, and new with each process start and election.

        `term_ends_ns` is until when it leads unless lead_until() says more; None: for ever.
        `tally` counts for all terms of the process; None: one of its own.
        """
        assert 0 < term < 2**64
        self.config = config
        self.term = term
        self.deposed = False
        """True for ever once this term is over."""
        self._lead_until_ns = NEVER_NS if term_ends_ns is None else term_ends_ns
        self._engines = Engines(config.engines_max, config.engines_away_max)
        self._conversations = Conversations(config.conversations_max)
        self._recorded = Snapshot().conversations
        """What earlier terms recorded; asked when a conversation is new to this one."""
        self._deadlines: DeadlineQueue[Engine | Lease] = DeadlineQueue()
        self._overdue: dict[LeaseId, tuple[LeaseView, int]] = {}
        """Reads that ended by their bound and not by EndRead, with when they began."""
        self._lease_count = 0
        self._reading_count = 0
        """Leases that are READING."""
        self._tally = Tally() if tally is None else tally
        self._tenants = Tenants()
        self._effects: list[Effect] = []
        self._now_ns = 0
        # Multiplied once: they are asked for in every operation.
        self._reader_bound_ns = config.reader_bound_ns
        self._inherit_bound_ns = config.inherit_bound_ns
        self._hold_ns = config.hold_ns
        self._engine_limits = config.engine_limits
        self._tenant_limits = config.tenant_limits

    # ---- the shell's side ----------------------------------------------------------------

    def drain(self) -> list[Effect]:
        """Returns what has to be done since the last call, in order.

        Call it after every other method, also one that raised.
        """
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_ns(self) -> int | None:
        """Returns when to call expire() next, None if nothing is due ever.

        It may be early, never late, and in the past when expire() left some of its work.
        """
        next_ns = self._deadlines.next_ns()
        if self.deposed or self._lead_until_ns == NEVER_NS:
            return next_ns
        return self._lead_until_ns if next_ns is None else min(next_ns, self._lead_until_ns)

    def lead_until(self, deadline_ns: int) -> None:
        """Extends the time in which this process is sure to lead; never shortens it."""
        self._lead_until_ns = max(self._lead_until_ns, deadline_ns)

    def depose(self) -> None:
        """Ends this term: all sessions end, and every later call raises NotLeader."""
        if self.deposed:
            return
        self.deposed = True
        self._deadlines = DeadlineQueue()
        for engine in self._engines.all():
            if engine.session is not None:
                self._effects.append(EndSession(_session_id(engine), NotLeader()))
                self._tally.sessions_ended["deposed"] += 1
                engine.session = None

    def expire(self, now_ns: int) -> None:
        """Ends what is due: dead sessions, idle and over-long leases, waits that are over."""
        if self._is_over(now_ns):
            return
        self._advance(now_ns)
        for _ in range(self.config.expiries_per_tick_max):
            item = self._deadlines.pop_due(now_ns)
            if item is None:
                return
            if isinstance(item, Lease):
                self._settle(item, now_ns)
            elif self._live(item, now_ns) is None and now_ns >= item.forget_ns:
                self._forget_leases(item)
            else:
                self._arm_engine(item)

    def restore(self, snapshot: Snapshot, now_ns: int) -> None:
        """Takes over what an earlier term recorded; before anything else.

        It knows who is fenced and who held what, not what may be read: engines bring that.
        """
        self._advance(now_ns)
        for record in snapshot.sessions.values():
            self._engines.restore(record)
        self._recorded = snapshot.conversations

    # ---- engines -------------------------------------------------------------------------

    def register(
        self,
        session_id: SessionId,
        info: EngineInfo,
        inventory: Sequence[Retention],
        *,
        quiet_ns: int | None,
        previous_term: int,
        now_ns: int,
        hold_ns: int = 0,
    ) -> None:
        """Opens a session, which replaces all that was believed about the engine.

        `quiet_ns` is the engine's time since it last vouched for any retention, None if it never
        did; `hold_ns` for how long after that a reader of any earlier term may remain. Leases over
        a limit are ended at once, not refused: an earlier term's reader may remain. Raises
        SessionFenced, IncarnationInUse, EnginesExhausted or InvalidArgument, and has then changed
        nothing.
        """
        self._advance(now_ns)
        self._check_registration(session_id, info, inventory)
        engine = self._engines.enter(session_id)
        self._tally.registrations += 1
        if engine.session is not None:
            self._tally.sessions_ended["fenced"] += 1
            self._effects.append(EndSession(_session_id(engine), SessionFenced()))
        if engine.incarnation != session_id.incarnation:
            self._replace_incarnation(engine, session_id.incarnation)
        wait_ns = self._inherit_wait_ns(engine, quiet_ns, hold_ns, previous_term)
        if engine.session is None or engine.info != info:
            self._effects.append(EngineChanged(engine.engine_id))
        engine.number = session_id.number
        engine.info = info
        engine.remembered = True
        engine.session = Session(session_id.number, now_ns, self.config.session_ttl_ns)
        engine.forget_ns = NEVER_NS
        self._arm_engine(engine)
        self._send(engine, Registered(), now_ns)
        self._record_session(engine)
        self._take_inventory(engine, inventory, now_ns + wait_ns if wait_ns else 0, now_ns)

    def heartbeat(
        self,
        session_id: SessionId,
        sequence: int,
        *,
        echo_term: int,
        echo_sequence: int,
        withdrawn: Sequence[tuple[LeaseId, ReleaseReason]],
        memory: KvMemory | None,
        now_ns: int,
    ) -> None:
        """Extends trust by the echo, ends withdrawn leases, and is acknowledged.

        Raises SessionFenced, SessionExpired, SequenceGap or InvalidArgument; the caller then
        ends the stream and with it the session. Nothing else has changed.
        """
        engine = self._enter(session_id, sequence, now_ns)
        session = engine.session
        assert session is not None
        if echo_term == self.term:
            session.check_echo(echo_sequence)
        for index, (lease_id, _) in enumerate(withdrawn):
            self._check_lease_id(session_id, lease_id, f"heartbeat.withdrawn[{index}].lease_id")
        self._tally.heartbeats += 1
        session.heartbeat_ns = now_ns
        session.memory = memory
        if echo_term == self.term and echo_sequence > 0:  # another term's is not our message
            session.echo(echo_sequence, self.config.session_ttl_ns)
            _strike_received(engine.releasing, echo_sequence)
            if self._engines.fence_displaced(engine):
                self._record_session(engine)
            self._effects.append(Record(SessionKept(engine.engine_id)))
            self._arm_engine(engine)
        for lease_id, reason in withdrawn:
            self._withdraw(engine, lease_id, reason, now_ns)
        reading = tuple(each for each, _ in withdrawn if each.number in engine.leases)
        self._send(engine, HeartbeatAck(reading, self._take_outlooks(engine)), now_ns)

    def grant(
        self, session_id: SessionId, sequence: int, retention: Retention, now_ns: int
    ) -> None:
        """Takes a new retention; refused with a message to the engine if over a limit.

        It supersedes the conversation's lease. Raises as heartbeat() does.
        """
        engine = self._enter(session_id, sequence, now_ns)
        field = "grant.retention.lease_id"
        self._check_lease_id(session_id, retention.lease_id, field)
        if self._is_known(engine, retention.lease_id):
            raise InvalidArgument(field, "was granted before")
        refusal = self._refusal(engine, retention)
        if refusal is not None:
            self._refuse(engine, retention.lease_id, refusal, now_ns)
            return
        self._tally.grants += 1
        conversation = self._conversation(retention.conversation)
        conversation.turn = retention.turn
        lease = Lease(engine, conversation, retention, now_ns)
        if _is_closed(conversation, now_ns):
            self._tally.ended[ReleaseReason.ENDED] += 1
            self._attach_ended(lease, ReleaseReason.ENDED, now_ns)
        else:
            self._supersede(conversation, now_ns)
            self._extend_life(conversation, now_ns)
            self._attach(lease, now_ns)
        self._effects.append(Announced(retention, not lease.ended))

    def refuse_grant(
        self, session_id: SessionId, sequence: int, lease_id: LeaseId, reason: str, now_ns: int
    ) -> None:
        """Refuses a retention that cannot be taken as it is. Raises as heartbeat() does."""
        engine = self._enter(session_id, sequence, now_ns)
        field = "grant.retention.lease_id"
        self._check_lease_id(session_id, lease_id, field)
        if self._is_known(engine, lease_id):  # it may be being read, so it must not be freed
            raise InvalidArgument(field, "was granted before")
        self._refuse(engine, lease_id, reason, now_ns)

    def freed(
        self,
        session_id: SessionId,
        sequence: int,
        lease_id: LeaseId,
        reason: ReleaseReason,
        now_ns: int,
    ) -> None:
        """Notes that the engine freed a retention by itself; unknown ones are let pass.

        Raises as heartbeat() does.
        """
        engine = self._enter(session_id, sequence, now_ns)
        self._check_lease_id(session_id, lease_id, "freed.lease_id")
        lease = engine.leases.get(lease_id.number)
        if lease is not None:
            self._drop(lease, reason)

    def close_session(self, session_id: SessionId, now_ns: int) -> None:
        """Ends a session with its stream; nothing if it is not the engine's newest."""
        if self._is_over(now_ns):
            return
        self._advance(now_ns)
        engine = self._engines.get(session_id.engine_id)
        if engine is not None and self._is_current(engine, session_id):
            self._lapse(engine, None, now_ns)

    def list_engines(self, now_ns: int) -> list[EngineView]:
        """Returns the engines with a live session, in order of engine id."""
        self._advance(now_ns)
        engines = sorted(self._engines.all(), key=lambda each: each.engine_id)
        views = (self._engine_view(engine, now_ns) for engine in engines)
        return [view for view in views if view is not None]

    def get_engine(self, engine_id: str, now_ns: int) -> EngineView | None:
        """Returns an engine, None if it has no live session."""
        self._advance(now_ns)
        engine = self._engines.get(engine_id)
        return None if engine is None else self._engine_view(engine, now_ns)

    def drain_engine(self, engine_id: str, draining: bool, now_ns: int) -> None:
        """Has routers send an engine no new turns, or take it up again. Idempotent.

        It holds for the engine's later sessions and incarnations too. Raises EngineNotFound.
        """
        self._advance(now_ns)
        engine = self._engines.get(engine_id)
        if engine is None:
            raise EngineNotFound
        if engine.draining != draining:
            engine.draining = draining
            self._record_session(engine)
            self._effects.append(EngineChanged(engine_id))

    def census(self) -> Census:
        """Returns what there is now, as far as was looked; costs the number of engines."""
        holdings = [
            Holding(
                engine.engine_id,
                engine.draining,
                engine.active_count,
                engine.usage.blocks,
                engine.usage.tokens,
                engine.session.memory,
                engine.session.heartbeat_ns,
            )
            for engine in self._engines.all()
            if engine.session is not None
        ]
        held = sum(engine.active_count for engine in self._engines.all())
        return Census(
            active=held - self._reading_count,
            reading=self._reading_count,
            ending=self._lease_count - held,
            holdings=holdings,
            away=self._engines.away_count,
            conversations=len(self._conversations),
        )

    # ---- readers -------------------------------------------------------------------------

    def begin_read(self, lease_id: LeaseId, key: ConversationKey, now_ns: int) -> ReadAnswer:
        """Grants the one right to read the lease, or says why not. Never granted again."""
        self._advance(now_ns)
        conversation = self._known(key)
        lease = self._find(lease_id)
        if lease is None or lease.conversation is not conversation:
            return self._unreadable(_past_verdict(lease_id, conversation))
        if not self._settle(lease, now_ns):
            return self._unreadable(_past_verdict(lease_id, conversation))
        verdict = self._read_refusal(lease, lease_id, now_ns)
        if verdict != Verdict.NONE:
            return self._unreadable(verdict)
        self._tally.reads_granted += 1
        self._reading_count += 1
        lease.read_ns = now_ns
        lease.read_session_number = lease_id.session_number
        lease.read_open = True
        payload, lease.payload = lease.payload, b""  # no second reader will ask for it
        self._extend_life(lease.conversation, now_ns)
        return ReadAnswer(Verdict.NONE, payload, lease.engine.info.nixl)

    def end_read(self, lease_id: LeaseId, outcome: ReadOutcome, now_ns: int) -> None:
        """Notes that no transfer of the lease's read runs or can start any more.

        Idempotent. The id is the one that the read began under, also when the engine has
        registered again since.
        """
        self._advance(now_ns)
        self._overdue.pop(lease_id, None)
        lease = self._find(lease_id)
        if lease is None or not lease.read_open:
            return
        if lease.read_session_number != lease_id.session_number:
            return
        self._tally.reads_ended[outcome] += 1
        self._close_read(lease)
        completed = outcome == ReadOutcome.COMPLETED
        self._end(lease, ReleaseReason.CONSUMED if completed else ReleaseReason.READ_FAILED)
        self._settle(lease, now_ns)

    # ---- conversations -------------------------------------------------------------------

    def knows(self, key: ConversationKey, now_ns: int) -> bool:
        """Tells whether this term or an earlier one knows the conversation."""
        self._advance(now_ns)
        return self._known(key) is not None

    def held(self, key: ConversationKey, now_ns: int) -> LeaseView | None:
        """Returns the conversation's lease that has not ended, None if there is none."""
        self._advance(now_ns)
        conversation = self._known(key)
        if conversation is None or conversation.lease is None:
            return None
        return self._view(conversation.lease, now_ns)

    def awaits_turn(self, key: ConversationKey, turn: int, now_ns: int) -> bool:
        """Returns True if a retention of `turn` or later has yet to be announced.

        Ask again when one of the conversation is Announced. `turn` 0 expects none.
        """
        self._advance(now_ns)
        conversation = self._known(key)
        if turn == 0:
            return False
        if conversation is None:
            return True
        unknown = conversation.turn == 0 and conversation.lease is not None
        return not unknown and conversation.turn < turn and not conversation.closed

    def resolve(self, key: ConversationKey, now_ns: int) -> Resolution:
        """Tells who holds the conversation, at the beginning of a turn of it."""
        self._advance(now_ns)
        conversation = self._conversation(key)
        if conversation.lease is not None:
            self._settle(conversation.lease, now_ns)
        self._forget_lost_turns(conversation, now_ns)
        conversation.closed = False
        conversation.seen_ns = now_ns
        conversation.alive_until_ns = now_ns + self._idle_ns(conversation)
        if conversation.lease is not None:
            self._note_outlook(conversation.lease)
            self._arm_lease(conversation.lease)
        return self._resolution(conversation, now_ns)

    def _resolution(self, conversation: Conversation, now_ns: int) -> Resolution:
        """Returns who holds a conversation, whose lease is settled, as a turn of it is told."""
        lease = conversation.lease
        if lease is None:
            verdict = conversation.verdict
            if verdict == Verdict.FIRST_TURN:
                conversation.verdict = Verdict.NO_LEASE
            return self._unheld(conversation, verdict)
        lease_id = self._id_of(lease)
        verdict = self._read_refusal(lease, lease_id, now_ns)
        if verdict != Verdict.NONE:
            return self._unheld(conversation, verdict)
        return Resolution(
            lease_id,
            Verdict.NONE,
            lease.engine.engine_id,
            lease.engine.info.http_address,
            lease.token_count,
            lease.prompt_tokens,
            lease.history,
        )

    def begin_turn(
        self, key: ConversationKey, ask: bool, now_ns: int
    ) -> tuple[int, Resolution | None]:
        """Notes that a turn began, as touch() does.

        Returns its number in the conversation, from 1, and, if it asks, what resolve() tells.
        """
        conversation = self._touched(key, 1, now_ns)
        conversation.told_in_flight += 1
        last = max(conversation.turns_begun, conversation.turn)
        conversation.turns_begun = min(last + 1, TURN_MAX)
        return conversation.turns_begun, self._resolution(conversation, now_ns) if ask else None

    def take_over_turn(self, key: ConversationKey, number: int, now_ns: int) -> None:
        """Notes that a turn is in flight which was numbered before, maybe by another term.

        `number` is 0 if it is not known; else no turn that begins gets it again.
        """
        conversation = self._touched(key, 1, now_ns)
        conversation.told_in_flight += 1
        conversation.turns_begun = max(conversation.turns_begun, conversation.turn, number, 1)

    def trace_turn(self, key: ConversationKey, span: bytes) -> bytes:
        """Remembers what names the span of the turn that began last.

        Returns what names that of the latest one before it, empty if none is remembered.
        """
        conversation = self._conversations.get(key)
        if conversation is None:
            return b""
        previous, conversation.traced = conversation.traced, span
        return previous

    def end_turn(self, key: ConversationKey, now_ns: int) -> None:
        """Notes that a turn is over which began by begin_turn() or take_over_turn()."""
        conversation = self._touched(key, -1, now_ns)
        conversation.told_in_flight = max(conversation.told_in_flight - 1, 0)

    def touch(self, key: ConversationKey, turns_in_flight_delta: int, now_ns: int) -> None:
        """Notes a sign of life, and that so many more turns began than ended."""
        self._touched(key, turns_in_flight_delta, now_ns)

    def _touched(
        self, key: ConversationKey, turns_in_flight_delta: int, now_ns: int
    ) -> Conversation:
        self._advance(now_ns)
        conversation = self._conversation(key)
        if conversation.lease is not None:
            self._settle(conversation.lease, now_ns)
        self._forget_lost_turns(conversation, now_ns)
        count = conversation.turns_in_flight + turns_in_flight_delta
        conversation.turns_in_flight = min(max(count, 0), TURNS_IN_FLIGHT_MAX)
        if turns_in_flight_delta > 0:
            conversation.closed = False
            conversation.alive_until_ns = 0  # a declared absence is over
            if conversation.absence_ns > self.config.idle_ns:
                conversation.absence_ns = 0
        self._extend_life(conversation, now_ns)
        return conversation

    def keep_alive(self, key: ConversationKey, absence_ns: int | None, now_ns: int) -> int:
        """Its client will be back within `absence_ns`, or say so again: it is idle after that.

        None means the idle time; more than the longest hold is cut to it. A time shorter than
        the idle time replaces it, as what signs of life count for, until it has been idle.
        Returns for how long the retention is kept without another sign of life, in nanoseconds;
        0 if none is held. Raises ConversationNotFound.
        """
        self._advance(now_ns)
        conversation = self._known(key)
        if conversation is None:
            raise ConversationNotFound
        if conversation.lease is not None:
            self._settle(conversation.lease, now_ns)
        wanted_ns = self.config.idle_ns if absence_ns is None else absence_ns
        conversation.absence_ns = min(wanted_ns, self.config.max_hold_ns)
        conversation.seen_ns = now_ns
        conversation.alive_until_ns = now_ns + conversation.absence_ns
        lease = conversation.lease
        if lease is None:
            return 0
        self._note_outlook(lease)
        self._arm_lease(lease)
        return max(0, self._lease_deadline_ns(lease) - now_ns)

    def end_conversation(self, key: ConversationKey, now_ns: int) -> int:
        """Ends the conversation's lease, if any; returns how many were ended. Idempotent."""
        self._advance(now_ns)
        conversation = self._known(key)
        if conversation is None:
            return 0
        lease = conversation.lease
        if lease is not None and self._settle(lease, now_ns) and not lease.ended:
            self._end(lease, ReleaseReason.ENDED)
            self._settle(lease, now_ns)
        else:
            lease = None
        conversation.verdict = Verdict.ENDED
        conversation.closed = True
        conversation.seen_ns = now_ns
        conversation.absence_ns = 0
        conversation.alive_until_ns = now_ns + self.config.idle_ns
        return 0 if lease is None else 1

    # ---- operators -----------------------------------------------------------------------

    def get_lease(self, lease_id: LeaseId, now_ns: int) -> LeaseView:
        """Returns a lease of a live session, or one whose read is overdue. Raises LeaseNotFound.

        A read past its bound keeps no blocks, but whoever waits for it, and cannot tell a stuck
        read from one that is over, learns here that no EndRead has come.
        """
        self._advance(now_ns)
        overdue = self._overdue.get(lease_id)
        if overdue is not None:
            view, read_ns = overdue
            return replace(view, reading_for_ns=now_ns - read_ns)
        return self._view(self._current(lease_id, now_ns), now_ns)

    def revoke(self, lease_id: LeaseId, now_ns: int) -> None:
        """Ends a lease of a live session; nothing if it has ended. Raises LeaseNotFound."""
        lease = self._current(lease_id, now_ns)
        self._end(lease, ReleaseReason.REVOKED)
        self._settle(lease, now_ns)

    def list_leases(
        self,
        *,
        engine_id: str,
        key: ConversationKey | None,
        after: str,
        count_max: int,
        now_ns: int,
    ) -> list[LeaseView]:
        """Returns up to `count_max` leases of live sessions in order of lease id, after `after`.

        `engine_id` and `key`, if given, leave out the others. Costs the number of engines and of
        the leases of those engines that the page touches.
        """
        self._advance(now_ns)
        if engine_id:
            one = self._engines.get(engine_id)
            engines = [] if one is None else [one]
        else:
            engines = sorted(self._engines.all(), key=lambda each: each.incarnation + ".")
        page: list[LeaseView] = []
        for engine in engines:
            past = engine.incarnation + "/" <= after  # "/" is the character after "."
            if past or self._live(engine, now_ns) is None:
                continue
            leases = (
                (str(self._id_of(lease)), lease)
                for lease in engine.leases.values()
                if key is None or lease.conversation.key == key
            )
            later = (pair for pair in leases if pair[0] > after)
            for _, lease in heapq.nsmallest(count_max - len(page), later, key=lambda pair: pair[0]):
                page.append(self._view(lease, now_ns))
            if len(page) == count_max:
                break
        return page

    def find_conversations(self, wanted: Wanted, count_max: int, now_ns: int) -> ConversationSearch:
        """Begins a search of the conversations of this term; its steps change nothing here."""
        self._advance(now_ns)
        return ConversationSearch(self._conversations.all(), wanted, count_max)

    def view_conversation(self, conversation: Conversation, now_ns: int) -> ConversationView:
        """Returns a conversation, which a search found, as it is now."""
        self._advance(now_ns)
        lease = conversation.retained
        idle_in_ns = None if lease is None else self._view(lease, now_ns).idle_in_ns
        return ConversationView(
            conversation.key,
            max(conversation.turns_begun, conversation.turn),
            conversation.turns_in_flight,
            now_ns - conversation.seen_ns if conversation.seen_ns else None,
            conversation.engine_id,
            0 if lease is None else lease.token_count,
            0 if lease is None else lease.block_count,
            0 if lease is None else 1,
            idle_in_ns,
        )

    # ---- sessions ------------------------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        assert now_ns >= self._now_ns, "the clock went back"
        self._now_ns = now_ns
        if self._is_over(now_ns):
            raise NotLeader

    def _is_over(self, now_ns: int) -> bool:
        if now_ns >= self._lead_until_ns:
            self.depose()
        return self.deposed

    def _check_registration(
        self, session_id: SessionId, info: EngineInfo, inventory: Sequence[Retention]
    ) -> None:
        """Raises what register() raises; changes nothing."""
        engine = self._engines.check(session_id)
        same = engine is not None and engine.incarnation == session_id.incarnation
        if inventory and not info.retains:
            raise InvalidArgument("register.inventory", "must be empty: a prefill engine retains")
        numbers = set()
        for index, retention in enumerate(inventory):
            field = f"register.inventory[{index}]"
            self._check_lease_id(session_id, retention.lease_id, f"{field}.lease_id")
            number = retention.lease_id.number
            if number in numbers:
                raise InvalidArgument(f"{field}.lease_id", "appears twice")
            numbers.add(number)
            known = engine.leases.get(number) if engine is not None and same else None
            if known is not None and known.conversation.key != retention.conversation:
                raise InvalidArgument(f"{field}.conversation", "differs from what was granted")

    @staticmethod
    def _check_lease_id(session_id: SessionId, lease_id: LeaseId, field: str) -> None:
        if lease_id.incarnation != session_id.incarnation:
            raise InvalidArgument(field, "names another incarnation")
        if lease_id.session_number != session_id.number:
            raise InvalidArgument(field, "names another session")

    def _replace_incarnation(self, engine: Engine, incarnation: str) -> None:
        """The engine lost its KV: nothing that it held exists any more."""
        for lease in list(engine.leases.values()):
            self._drop(lease, ReleaseReason.ENGINE_LOST)
        engine.releasing.clear()
        engine.remembered = False
        self._engines.replace_incarnation(engine, incarnation)

    def _inherit_wait_ns(
        self, engine: Engine, quiet_ns: int | None, hold_ns: int, previous_term: int
    ) -> int:
        """Returns how long readers of earlier terms may remain after this Register."""
        if quiet_ns is None:  # never vouched, so no term could grant
            return 0
        if previous_term == self.term and engine.remembered:
            return 0
        # An earlier term may have allowed longer reads than this one does.
        return max(0, max(self._inherit_bound_ns, hold_ns) - quiet_ns)

    def _take_inventory(
        self, engine: Engine, inventory: Sequence[Retention], inherit_until_ns: int, now_ns: int
    ) -> None:
        listed = {retention.lease_id.number for retention in inventory}
        unheard, engine.releasing = engine.releasing, OrderedDict()
        for lease in list(engine.leases.values()):
            if lease.number not in listed:
                # The engine freed it while away: on the notice of its reader, if it had one.
                begun = lease.begun
                self._drop(lease, ReleaseReason.CONSUMED if begun else ReleaseReason.PRESSURE)
        for retention in inventory:
            known = engine.leases.get(retention.lease_id.number)
            if known is None:
                lease = Lease(engine, self._conversation(retention.conversation), retention, now_ns)
                lease.inherit_until_ns = inherit_until_ns
                if lease.number in unheard:  # counted when it ended
                    _, reason = unheard[lease.number]
                else:
                    reason = self._end_of_inherited(lease, retention, now_ns)
                    self._tally.inherited += 1
                    if reason != ReleaseReason.NONE:
                        self._tally.ended[reason] += 1
                self._inherit(lease, reason, now_ns)
                if not lease.ended:
                    self._effects.append(Announced(retention, held=True))
            else:
                known.inherit_until_ns = max(known.inherit_until_ns, inherit_until_ns)
                if not known.begun and not known.ended:
                    known.payload = retention.payload
                if not known.ended:  # what the store hung on the old session may be gone
                    self._record_conversation(known.conversation, ReleaseReason.NONE)
                if known.outlook != Outlook.NORMAL:  # a new session starts from there
                    engine.outlooks[known.number] = known
                self._settle(known, now_ns)

    def _end_of_inherited(self, lease: Lease, retention: Retention, now_ns: int) -> ReleaseReason:
        """Returns why a lease that this term sees for the first time has ended, NONE if not."""
        if self._refusal(lease.engine, retention) is not None:
            return ReleaseReason.PRESSURE
        if _is_closed(lease.conversation, now_ns):
            return ReleaseReason.ENDED
        incumbent = lease.conversation.lease
        if incumbent is not None and not _is_newer(lease, incumbent):
            return ReleaseReason.SUPERSEDED
        return ReleaseReason.NONE

    def _inherit(self, lease: Lease, end_reason: ReleaseReason, now_ns: int) -> None:
        if end_reason != ReleaseReason.NONE:
            self._attach_ended(lease, end_reason, now_ns)
            return
        lease.conversation.turn = lease.turn
        self._supersede(lease.conversation, now_ns)
        self._extend_life(lease.conversation, now_ns)
        self._attach(lease, now_ns)

    def _is_current(self, engine: Engine, session_id: SessionId) -> bool:
        return (
            engine.session is not None
            and engine.incarnation == session_id.incarnation
            and engine.session.number == session_id.number
        )

    def _enter(self, session_id: SessionId, sequence: int, now_ns: int) -> Engine:
        """Returns the engine whose session a message belongs to; it lives, nothing is missing.

        The deadline comes first: a heartbeat that waited somewhere for longer than the TTL must
        not raise the dead.
        """
        self._advance(now_ns)
        engine = self._engines.get(session_id.engine_id)
        if engine is None or engine.incarnation != session_id.incarnation:
            raise SessionFenced
        if engine.number != session_id.number:
            raise SessionFenced
        session = self._live(engine, now_ns)
        if session is None:
            raise SessionExpired
        try:
            session.receive(sequence)
        except SequenceGap:
            self._lapse(engine, None, now_ns)
            raise
        return engine

    def _live(self, engine: Engine, now_ns: int) -> Session | None:
        """Returns the engine's session if it has one that lives; ends it if it is past."""
        session = engine.session
        if session is not None and now_ns >= session.deadline_ns:
            self._lapse(engine, SessionExpired(), now_ns)
            return None
        return session

    def _lapse(self, engine: Engine, error: LeaseServiceError | None, now_ns: int) -> None:
        """Ends the engine's session; its leases are kept in case it comes back."""
        assert engine.session is not None
        self._tally.sessions_ended["closed" if error is None else "expired"] += 1
        if error is not None:
            self._effects.append(EndSession(_session_id(engine), error))
            engine.expired_count += 1
            engine.expired_ns = now_ns
        engine.session = None
        engine.outlooks.clear()
        self._effects.append(EngineChanged(engine.engine_id))
        self._effects.append(Record(SessionClosed(engine.engine_id)))
        for lease in engine.leases.values():
            lease.payload = b""  # the next Register brings it
        self._engines.leave(engine)
        engine.forget_ns = now_ns + self.config.away_memory_ns
        self._deadlines.disarm(engine)
        self._arm_engine(engine)
        if self._engines.is_crowded():
            self._forget_engine()

    def _arm_engine(self, engine: Engine) -> None:
        session = engine.session
        self._deadlines.arm(engine, engine.forget_ns if session is None else session.deadline_ns)

    def _forget_leases(self, engine: Engine) -> None:
        """Gives up the leases of an engine that stays away; it is fenced as before."""
        self._engines.give_up(engine)
        engine.remembered = False
        engine.releasing.clear()
        engine.forget_ns = NEVER_NS
        self._deadlines.disarm(engine)
        for lease in list(engine.leases.values()):
            self._drop(lease, ReleaseReason.ENGINE_LOST)

    def _forget_engine(self) -> None:
        """Forgets the engine without a session that can best be done without."""
        engine = self._engines.forget_gone()
        if engine is None:
            longest = self._engines.longest_away()
            assert longest is not None
            self._forget_leases(longest)
            engine = self._engines.forget_gone()
        assert engine is not None
        self._effects.append(Record(EngineForgotten(engine.engine_id)))

    def _send(self, engine: Engine, message: EngineMessage, now_ns: int) -> int:
        """Sends a message on the engine's session; returns its sequence."""
        session = engine.session
        assert session is not None
        sequence = session.stamp(now_ns)
        self._effects.append(SendToEngine(_session_id(engine), sequence, message))
        return sequence

    def _record_session(self, engine: Engine) -> None:
        record = SessionRecord(
            engine.engine_id,
            engine.incarnation,
            engine.number,
            tuple(engine.fenced),
            engine.draining,
        )
        self._effects.append(Record(SessionOpened(record)))

    def _engine_view(self, engine: Engine, now_ns: int) -> EngineView | None:
        session = self._live(engine, now_ns)
        if session is None:
            return None
        return EngineView(
            engine.engine_id,
            session.number,
            engine.info.description,
            engine.active_count,
            session.memory,
            now_ns - session.heartbeat_ns,
            engine.draining,
            engine.expired_count,
            None if engine.expired_ns is None else now_ns - engine.expired_ns,
        )

    # ---- leases --------------------------------------------------------------------------

    def _refuse(self, engine: Engine, lease_id: LeaseId, reason: str, now_ns: int) -> None:
        self._tally.grants_refused[reason] += 1
        self._send(engine, GrantRefused(lease_id, reason), now_ns)

    def _unreadable(self, verdict: Verdict) -> ReadAnswer:
        self._tally.reads_refused[verdict] += 1
        return ReadAnswer(verdict)

    def _find(self, lease_id: LeaseId) -> Lease | None:
        """Returns the lease of the id's retention, under whatever session number it is now."""
        engine = self._engines.of_incarnation(lease_id.incarnation)
        return None if engine is None else engine.leases.get(lease_id.number)

    def _current(self, lease_id: LeaseId, now_ns: int) -> Lease:
        """Returns the lease if a live session holds it under this id. Raises LeaseNotFound."""
        self._advance(now_ns)
        lease = self._find(lease_id)
        if lease is None or not self._settle(lease, now_ns):
            raise LeaseNotFound
        if lease.engine.session is None or self._id_of(lease) != lease_id:
            raise LeaseNotFound
        return lease

    @staticmethod
    def _is_known(engine: Engine, lease_id: LeaseId) -> bool:
        return lease_id.number in engine.leases or lease_id.number in engine.releasing

    @staticmethod
    def _id_of(lease: Lease) -> LeaseId:
        return LeaseId(lease.engine.incarnation, lease.number, lease.engine.number)

    def _refusal(self, engine: Engine, retention: Retention) -> str | None:
        """Returns the limit that a new retention of the engine breaks, None if there is none."""
        if not engine.info.retains:
            return "ROLE_CANNOT_RETAIN"
        blocks, tokens = retention.block_count, retention.token_count
        if blocks > self.config.blocks_per_lease_max:
            return "BLOCKS_EXHAUSTED"
        if tokens > self.config.tokens_per_lease_max:
            return "TOKENS_EXHAUSTED"
        leases = 1 + len(engine.releasing)
        excess = engine.usage.excess(self._engine_limits, leases, blocks, tokens)
        if excess is not None:
            return f"{excess}_EXHAUSTED"
        if self._exceeds_tenant(retention):
            return "TENANT_EXHAUSTED"
        while self._lease_count >= self.config.leases_max:
            longest = self._engines.longest_away()
            if longest is None:
                return "LEASES_EXHAUSTED"
            self._forget_leases(longest)
        return None

    def _exceeds_tenant(self, retention: Retention) -> bool:
        """The conversation's own lease, which a grant supersedes, counts for nothing."""
        leases, blocks, tokens = 1, retention.block_count, retention.token_count
        conversation = self._conversations.get(retention.conversation)
        if conversation is not None and conversation.lease is not None:
            leases -= 1
            blocks -= conversation.lease.block_count
            tokens -= conversation.lease.token_count
        usage = self._tenants.of(retention.conversation.tenant)
        return usage.excess(self._tenant_limits, leases, blocks, tokens) is not None

    def _attach(self, lease: Lease, now_ns: int) -> None:
        """Makes a new lease the one of its conversation."""
        conversation, engine = lease.conversation, lease.engine
        self._count_in(lease)
        engine.active_count += 1
        self._tenants.add(lease)
        self._conversations.hold(conversation, lease)
        conversation.engine_id = engine.engine_id
        self._record_conversation(conversation, ReleaseReason.NONE)
        self._note_outlook(lease)
        self._settle(lease, now_ns)

    def _attach_ended(self, lease: Lease, reason: ReleaseReason, now_ns: int) -> None:
        """Takes a lease only to release it, once no reader of an earlier term remains."""
        lease.end_reason = reason
        lease.payload = b""
        self._count_in(lease)
        if lease.conversation.lease is None:
            self._note_end(lease)
        self._settle(lease, now_ns)

    def _count_in(self, lease: Lease) -> None:
        lease.engine.leases[lease.number] = lease
        lease.engine.usage.add(lease)
        self._lease_count += 1

    def _supersede(self, conversation: Conversation, now_ns: int) -> None:
        lease = conversation.lease
        if lease is not None:
            self._end(lease, ReleaseReason.SUPERSEDED)
            self._settle(lease, now_ns)

    def _withdraw(
        self, engine: Engine, lease_id: LeaseId, reason: ReleaseReason, now_ns: int
    ) -> None:
        lease = engine.leases.get(lease_id.number)
        if lease is None:
            # Released or refused before; the engine asked before it heard of that.
            self._send(engine, Release(lease_id, reason), now_ns)
        else:
            self._end(lease, reason)
            self._settle(lease, now_ns)

    def _end(self, lease: Lease, reason: ReleaseReason) -> None:
        """Stops granting the lease; the first reason stays. _settle() releases it in time."""
        if lease.ended:
            return
        self._tally.ended[reason] += 1
        if lease.read_open:
            self._reading_count -= 1
        lease.end_reason = reason
        lease.payload = b""
        lease.engine.active_count -= 1
        lease.engine.outlooks.pop(lease.number, None)
        self._tenants.remove(lease)
        self._conversations.let_go(lease.conversation)
        self._note_end(lease)
        self._forget_conversations()

    def _note_end(self, lease: Lease) -> None:
        """Remembers, for the turns to come, why the conversation's retention ended."""
        conversation = lease.conversation
        conversation.verdict = verdict_of(lease.end_reason)
        if lease.engine.session is None and lease.end_reason in _ENDS_OF_TIME:
            conversation.verdict = Verdict.ENGINE_LOST  # it was lost before its time was up
        conversation.engine_id = lease.engine.engine_id
        conversation.last_incarnation = lease.engine.incarnation
        conversation.last_number = lease.number
        self._record_conversation(conversation, lease.end_reason)

    def _settle(self, lease: Lease, now_ns: int) -> bool:
        """Applies what is due for the lease and arms what is not; False if it is gone now."""
        live = self._live(lease.engine, now_ns) is not None
        if lease.read_open and now_ns >= lease.read_ns + self._reader_bound_ns:
            self._close_read(lease)
            self._end(lease, ReleaseReason.READ_FAILED)
            self._note_overdue(lease, now_ns)
        if not lease.ended and not lease.read_open:
            if now_ns >= lease.granted_ns + self._hold_ns:
                self._end(lease, ReleaseReason.EXPIRED)
            elif now_ns >= self._idle_from_ns(lease.conversation):
                self._on_idle(lease)
        if live and lease.ended and not lease.read_open and now_ns >= lease.inherit_until_ns:
            release = Release(self._id_of(lease), lease.end_reason)
            sequence = self._send(lease.engine, release, now_ns)
            lease.engine.releasing[lease.number] = (sequence, lease.end_reason)
            self._remove(lease)
            return False
        self._arm_lease(lease)
        return True

    def _close_read(self, lease: Lease) -> None:
        """Notes that nobody reads the lease any more."""
        if not lease.ended:
            self._reading_count -= 1
        lease.read_open = False

    def _note_overdue(self, lease: Lease, now_ns: int) -> None:
        self._tally.reads_overdue += 1
        view = self._view(lease, now_ns)
        lease_id = view.lease_id._replace(session_number=lease.read_session_number)
        self._overdue[lease_id] = (replace(view, lease_id=lease_id), lease.read_ns)
        if len(self._overdue) > OVERDUE_READS_MAX:
            del self._overdue[next(iter(self._overdue))]

    def _lease_deadline_ns(self, lease: Lease) -> int:
        """Returns when _settle() has something to do next."""
        if lease.read_open:
            return lease.read_ns + self._reader_bound_ns
        if lease.ended:
            return NEVER_NS if lease.engine.session is None else lease.inherit_until_ns
        hold_until_ns = lease.granted_ns + self._hold_ns
        if lease.outlook == Outlook.IDLE:
            return hold_until_ns
        return min(hold_until_ns, self._idle_from_ns(lease.conversation))

    def _arm_lease(self, lease: Lease) -> None:
        self._deadlines.arm(lease, self._lease_deadline_ns(lease))

    def _drop(self, lease: Lease, reason: ReleaseReason) -> None:
        """Lets go of a lease whose blocks are known to be free, or whose engine is gone."""
        self._end(lease, reason)
        self._remove(lease)

    def _remove(self, lease: Lease) -> None:
        assert lease.ended
        self._deadlines.disarm(lease)
        del lease.engine.leases[lease.number]
        lease.engine.usage.remove(lease)
        self._lease_count -= 1

    def _view(self, lease: Lease, now_ns: int) -> LeaseView:
        conversation = lease.conversation
        idle_in_ns = None
        idle_from_ns = self._idle_from_ns(conversation)
        if lease.state == LeaseState.ACTIVE and idle_from_ns != NEVER_NS:
            idle_in_ns = max(0, idle_from_ns - now_ns)
        return LeaseView(
            self._id_of(lease),
            conversation.key,
            lease.engine.engine_id,
            lease.state,
            lease.end_reason,
            lease.token_count,
            lease.block_count,
            now_ns - lease.granted_ns,
            idle_in_ns,
            now_ns - lease.read_ns if lease.read_open else None,
        )

    def _read_refusal(self, lease: Lease, lease_id: LeaseId, now_ns: int) -> Verdict:
        """Returns why the lease, settled, cannot be read under this id now; NONE if it can."""
        if lease.begun:
            return Verdict.READ_IN_PROGRESS if lease.read_open else Verdict.CONSUMED
        if lease.ended:
            return verdict_of(lease.end_reason)
        session = lease.engine.session
        if session is None:
            return Verdict.ENGINE_LOST
        if session.number != lease_id.session_number:
            return Verdict.NO_LEASE
        if not session.proven or now_ns < lease.inherit_until_ns:
            return Verdict.NO_LEASE
        return Verdict.NONE

    # ---- conversations -------------------------------------------------------------------

    def _conversation(self, key: ConversationKey) -> Conversation:
        conversation = self._known(key)
        if conversation is None:
            conversation = self._conversations.add(key)
            self._forget_conversations()
        return conversation

    def _known(self, key: ConversationKey) -> Conversation | None:
        """Returns a conversation that this term or an earlier one knows; counts as a use of it."""
        conversation = self._conversations.get(key)
        if conversation is not None:
            return conversation
        recorded = self._recorded.get(key)
        if recorded is None:
            return None
        conversation = self._conversations.add(key)
        held = recorded.end_reason == ReleaseReason.NONE
        conversation.engine_id = recorded.engine_id
        conversation.verdict = Verdict.ENGINE_LOST if held else verdict_of(recorded.end_reason)
        self._forget_conversations()
        return conversation

    def _forget_conversations(self) -> None:
        forgotten = self._conversations.forget_surplus()
        if forgotten is not None and forgotten.engine_id:
            self._effects.append(Record(ConversationForgotten(forgotten.key)))

    def _extend_life(self, conversation: Conversation, now_ns: int) -> None:
        """Notes a sign of life, which never shortens what a client declared."""
        conversation.seen_ns = now_ns
        until_ns = now_ns + self._idle_ns(conversation)
        conversation.alive_until_ns = max(conversation.alive_until_ns, until_ns)
        if conversation.lease is not None:
            self._note_outlook(conversation.lease)
            self._arm_lease(conversation.lease)

    def _idle_ns(self, conversation: Conversation) -> int:
        """Returns for how long a sign of life counts."""
        return min(conversation.absence_ns or self.config.idle_ns, self.config.idle_ns)

    def _idle_from_ns(self, conversation: Conversation) -> int:
        """Returns when the conversation becomes idle, as things are.

        Where only pressure frees, silence says little: people are back a minute or two later as
        often as not, and engines learn how often. A client that broke its word says a lot.
        """
        policy = self.config.policy
        if conversation.turns_in_flight > 0 or policy == Policy.FIXED_TTL:
            return NEVER_NS
        if policy == Policy.PRESSURE and conversation.absence_ns == 0:
            return NEVER_NS
        return conversation.alive_until_ns

    def _on_idle(self, lease: Lease) -> None:
        lease.conversation.absence_ns = 0
        if self.config.policy == Policy.IDLE:
            self._end(lease, ReleaseReason.IDLE)
        else:
            self._set_outlook(lease, Outlook.IDLE)

    def _note_outlook(self, lease: Lease) -> None:
        """Notes, for the lease's engine, what its conversation's last sign of life means."""
        conversation = lease.conversation
        expected = conversation.turns_in_flight > 0 or conversation.absence_ns > 0
        self._set_outlook(lease, Outlook.EXPECTED if expected else Outlook.NORMAL)

    @staticmethod
    def _set_outlook(lease: Lease, outlook: Outlook) -> None:
        if lease.outlook != outlook:
            lease.outlook = outlook
            lease.engine.outlooks[lease.number] = lease

    def _take_outlooks(self, engine: Engine) -> tuple[tuple[LeaseId, Outlook], ...]:
        changed, engine.outlooks = engine.outlooks, {}
        return tuple((self._id_of(lease), lease.outlook) for lease in changed.values())

    def _forget_lost_turns(self, conversation: Conversation, now_ns: int) -> None:
        """A router without a session that died never reports its turns' end; silence does."""
        if now_ns >= conversation.alive_until_ns + self.config.max_hold_ns:
            conversation.turns_in_flight = conversation.told_in_flight

    def _record_conversation(self, conversation: Conversation, reason: ReleaseReason) -> None:
        record = ConversationRecord(conversation.engine_id, reason)
        self._effects.append(Record(ConversationChanged(conversation.key, record)))

    def _unheld(self, conversation: Conversation, verdict: Verdict) -> Resolution:
        engine = self._engines.get(conversation.engine_id)
        address = "" if engine is None else engine.info.http_address
        return Resolution(None, verdict, conversation.engine_id, address, 0)


def _session_id(engine: Engine) -> SessionId:
    assert engine.session is not None
    return SessionId(engine.engine_id, engine.incarnation, engine.session.number)


def _strike_received(
    releasing: OrderedDict[int, tuple[int, ReleaseReason]], echo_sequence: int
) -> None:
    """Forgets the releases that an echo shows to have arrived."""
    while releasing:
        number, (sequence, _) = next(iter(releasing.items()))
        if sequence > echo_sequence:
            return
        del releasing[number]


def _is_closed(conversation: Conversation, now_ns: int) -> bool:
    """True if the turn that left a retention began before the client ended the conversation."""
    return conversation.closed and (
        conversation.turns_in_flight > 0 or now_ns < conversation.alive_until_ns
    )


def _is_newer(lease: Lease, incumbent: Lease) -> bool:
    """Tells which of two retentions that a Register brought together is the later turn's.

    Grants need no such rule, they come in order of time; turn numbers and, where routers do not
    agree on them, the length of the history are what is left of that order here.
    """
    if lease.turn and incumbent.turn and lease.turn != incumbent.turn:
        return lease.turn > incumbent.turn
    return lease.token_count > incumbent.token_count


def _past_verdict(lease_id: LeaseId, conversation: Conversation | None) -> Verdict:
    """Returns why a lease that is gone cannot be read."""
    if conversation is None or not conversation.engine_id:
        return Verdict.NO_LEASE
    last = (conversation.last_incarnation, conversation.last_number)
    if last == (lease_id.incarnation, lease_id.number):
        return conversation.verdict
    return Verdict.RELEASED
