"""Routers' sessions: their turns in flight, and who waits for whose grant. No I/O, no clock.

A turn is in flight from its beginning to its end or, if that comes first, the end of its router's
session: a router that died leaves none. Turns are named here, for all routers: the history that a
turn was asked with tells which conversation it goes on with (kvturn/recognition.py).

A turn's grant can reach us later than the next turn of its conversation does, because the last
token takes a shorter way to the client. So the answer to a turn may wait for

  - a turn that ended and left a retention which has not been announced, and
  - a turn in flight whose whole history is a part of the new one's: the client has its answer,
    so that its end and its grant are on their way.

Every method that may bring answers or news leaves them for drain(), but for the answer that
begin() returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvturn_lease.conversation import ConversationKey
from kvturn_lease.deadline_queue import NEVER_NS, DeadlineQueue
from kvturn_lease.errors import ConversationNotFound, InvalidArgument, RoutersExhausted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvturn.recognition import Recognition
    from kvturn_lease.lease import Retention
    from kvturn_lease.lessor import Lessor, Resolution

FAMILY_MAX = 1_024
"""Conversations of a scope that one message is about; a scope can have nearly all there are."""

GRANT_UNDERWAY_NS = 1_000_000_000
"""How long after its turn's end a grant may be on its way; nobody waits longer for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Most that routers may have; each above 0."""

    sessions: int = 1_000
    """Sessions at once."""
    turns: int = 65_536
    """Turns in flight of one session; more are refused one by one."""
    waiting: int = 16
    """Turns of one conversation whose answers wait; more are answered at once."""


class Beginning(NamedTuple):
    """A turn that begins, as its router tells it."""

    turn_id: int
    key: ConversationKey
    recognise: bool
    points: Sequence[bytes]
    wait_ns: int
    reuse: bool
    number: int = 0
    """Of a turn that began in an earlier session: as that gave it, 0 if it did not."""
    span: bytes = b""
    """Names the turn's span; empty if it is not recorded."""
    parent: bytes = b""
    """Names the span under which ours begins; empty with `span`."""


class Begun(NamedTuple):
    """Answers a turn that began, or refuses it: then only `refused` is set."""

    turn_id: int
    conversation_id: str = ""
    number: int = 0
    resolution: Resolution | None = None
    """Who holds the conversation; None if the turn does not reuse."""
    extends: bool = False
    refused: str = ""
    previous: bytes = b""
    """Names the span of the conversation's turn before it, empty if there is none to link to."""


class Retained(NamedTuple):
    """A turn's retention was announced."""

    turn_id: int
    retention: Retention


News: TypeAlias = Begun | Retained


class Turn:
    """One turn: in flight, or ended and its grant awaited."""

    __slots__ = (
        *("ended", "id", "key", "number", "points", "previous", "retained", "session", "timer_ns"),
    )

    def __init__(
        self,
        session: RouterSession,
        turn_id: int,
        key: ConversationKey,
        points: Sequence[bytes],
        number: int,
    ) -> None:
        self.session = session
        self.id = turn_id
        self.key = key
        self.points = points
        self.number = number
        """In its conversation; 0 if it began in an earlier session, unanswered."""
        self.ended = False
        self.previous = b""
        """Names the span of the turn before it, where both are recorded; else empty."""
        self.retained = False
        """Its retention was announced."""
        self.timer_ns = NEVER_NS


class RouterSession:
    """One router's session."""

    __slots__ = ("open", "turns")

    def __init__(self) -> None:
        self.open = True
        self.turns: dict[int, Turn] = {}
        """In flight, by the router's id of them."""


class _Line:
    """The turns of one conversation that are in flight or awaited."""

    __slots__ = ("awaited", "by_history", "by_number", "count", "waiting")

    def __init__(self) -> None:
        self.count = 0
        """Turns in flight or awaited."""
        self.by_number: dict[int, Turn] = {}
        self.by_history: dict[bytes, Turn] = {}
        """Those whose retention was not announced; of equal histories the latest turn's."""
        self.awaited = 0
        """Turns that ended and whose retention was not announced."""
        self.waiting: list[Turn] = []
        """Turns in flight whose answer waits."""

    def add(self, turn: Turn) -> None:
        self.count += 1
        if turn.number:
            self.by_number[turn.number] = turn
        if turn.points:
            self.by_history[turn.points[0]] = turn

    def remove(self, turn: Turn) -> None:
        self.count -= 1
        # A conversation that was forgotten meanwhile counts from 1 again.
        if self.by_number.get(turn.number) is turn:
            del self.by_number[turn.number]
        self.forget_history(turn)

    def forget_history(self, turn: Turn) -> None:
        if turn.points and self.by_history.get(turn.points[0]) is turn:
            del self.by_history[turn.points[0]]

    def find(self, retention: Retention) -> Turn | None:
        """Returns the turn that left a retention; by its history if its number does not tell.

        A number is not known of a turn that was never answered, and two turns have the same one
        if another term gave it out before it was told of the first.
        """
        own = retention.history
        turn = self.by_number.get(retention.turn)
        if turn is not None and (not own or not turn.points or turn.points[0] == own):
            return turn
        turn = self.by_history.get(own)
        return turn if turn is not None and turn.number in (0, retention.turn) else None

    def must_wait(self, points: Sequence[bytes]) -> bool:
        """True if a grant is on its way that a turn with these points may go on from."""
        if self.awaited:
            return True
        by_history = self.by_history
        return bool(by_history) and any(point in by_history for point in points[1:])


class Routers:
    """All routers' sessions of one term. Not safe for threads; one event loop calls it."""

    def __init__(self, lessor: Lessor, recognition: Recognition, limits: RouterLimits) -> None:
        self._lessor = lessor
        self._recognition = recognition
        self._limits = limits
        self._sessions = 0
        self._lines: dict[ConversationKey, _Line] = {}
        self._deadlines: DeadlineQueue[Turn] = DeadlineQueue()
        self._news: list[tuple[RouterSession, News]] = []

    # ---- the shell's side ----------------------------------------------------------------

    def drain(self) -> list[tuple[RouterSession, News]]:
        """Returns what routers are to be told since the last call, in order."""
        news, self._news = self._news, []
        return news

    def next_deadline_ns(self) -> int | None:
        """Returns when to call expire() next, None if nothing is due ever. It may be early."""
        return self._deadlines.next_ns()

    def expire(self, now_ns: int) -> None:
        """Answers turns that have waited long enough, and gives up grants that did not come."""
        while (turn := self._deadlines.pop_due(now_ns)) is not None:
            if turn.ended:
                self._settle(turn, now_ns)
            else:
                self._lines[turn.key].waiting.remove(turn)
                self._answer(turn, now_ns)

    # ---- sessions ------------------------------------------------------------------------

    def open(self, in_flight: Iterable[Beginning], now_ns: int) -> RouterSession:
        """Opens a session with turns that began in earlier ones. Raises RoutersExhausted."""
        if self._sessions >= self._limits.sessions:
            raise RoutersExhausted(self._limits.sessions)
        self._sessions += 1
        session = RouterSession()
        for told in in_flight:
            if told.turn_id not in session.turns and len(session.turns) < self._limits.turns:
                self._recognition.began(told.key, told.points)
                self._lessor.take_over_turn(told.key, told.number, now_ns)
                turn = Turn(session, told.turn_id, told.key, told.points, told.number)
                if told.span:
                    self._lessor.trace_turn(told.key, told.span)
                self._count_in(turn)
        return session

    def close(self, session: RouterSession, now_ns: int) -> None:
        """Ends a session, and with it its turns in flight."""
        self._sessions -= 1
        session.open = False
        for turn_id in list(session.turns):
            self.end(session, turn_id, False, now_ns)

    # ---- turns ---------------------------------------------------------------------------

    def begin(self, session: RouterSession, told: Beginning, now_ns: int) -> Begun | None:
        """Counts a turn in and answers it; None if the answer waits: then drain() brings it.

        Raises InvalidArgument for a turn id that is in use.
        """
        if told.turn_id in session.turns:
            raise InvalidArgument("begin_turns.turn_id", "is that of a turn in flight")
        if len(session.turns) >= self._limits.turns:
            return Begun(told.turn_id, refused="TURNS_EXHAUSTED")
        key, points = told.key, told.points
        named = self._recognition.name(key, told.recognise, points)
        if named.conversation_id != key.conversation_id:
            key = ConversationKey(key.tenant, key.model, named.conversation_id)
        self._recognition.began(key, points)
        waits = told.reuse and told.wait_ns > 0 and self._must_wait(key, points, now_ns)
        asks = told.reuse and not waits
        number, resolution = self._lessor.begin_turn(key, asks, now_ns)
        turn = Turn(session, told.turn_id, key, points, number)
        if told.span:
            turn.previous = self._lessor.trace_turn(key, told.span)
        line = self._count_in(turn)
        if waits:
            line.waiting.append(turn)
            self._deadlines.arm(turn, now_ns + told.wait_ns)
            return None
        return _begun(turn, resolution)

    def end(self, session: RouterSession, turn_id: int, retains: bool, now_ns: int) -> Turn | None:
        """Counts a turn out; returns it, None if it is not in flight here.

        With `retains` its grant is awaited, unless it was announced before.
        """
        turn = session.turns.pop(turn_id, None)
        if turn is None:
            return None
        turn.ended = True
        self._recognition.ended(turn.key)
        self._lessor.end_turn(turn.key, now_ns)
        line = self._lines[turn.key]
        if turn.timer_ns != NEVER_NS:
            self._deadlines.disarm(turn)
            line.waiting.remove(turn)
        if retains and not turn.retained:
            line.awaited += 1
            self._deadlines.arm(turn, now_ns + GRANT_UNDERWAY_NS)
        else:
            self._leave(turn, line, now_ns)
        return turn

    def announced(self, retention: Retention, held: bool, now_ns: int) -> None:
        """Notes that a retention was announced; `held` unless it ended at once."""
        key = retention.conversation
        if held:
            self._recognition.retained(key, retention.history)
        line = self._lines.get(key)
        if line is None:
            return
        turn = line.find(retention)
        if turn is None or turn.retained:
            return
        turn.retained = True
        line.forget_history(turn)
        if turn.session.open:
            self._news.append((turn.session, Retained(turn.id, retention)))
        if turn.ended:
            self._settle(turn, now_ns)
        else:
            self._answer_waiting(line, now_ns)

    # ---- conversations -------------------------------------------------------------------

    def family(self, key: ConversationKey, most: int | None = None) -> Iterator[ConversationKey]:
        """Yields a conversation and those told apart under its id or scope, all or the latest."""
        ids = self._recognition.branches(key.tenant, key.model, key.conversation_id)
        yield key
        for each in ids if most is None else ids[-most:]:
            if each != key.conversation_id:
                yield ConversationKey(key.tenant, key.model, each)

    def end_conversation(self, key: ConversationKey, now_ns: int) -> int:
        """Ends a conversation, but none under it; returns how many leases that ended. Idempotent.

        A scope may have so many that ending them all takes seconds.
        """
        ended = self._lessor.end_conversation(key, now_ns)
        self._recognition.forget(key)
        return ended

    def keep_alive(self, key: ConversationKey, absence_ns: int | None, now_ns: int) -> int:
        """Keeps a conversation or scope from becoming idle, as Lessor.keep_alive() does.

        Of a scope, the latest FAMILY_MAX. Returns for how long what is kept longest is kept.
        Raises ConversationNotFound.
        """
        kept_ns = [
            self._lessor.keep_alive(each, absence_ns, now_ns)
            for each in self.family(key, FAMILY_MAX)
            if self._lessor.knows(each, now_ns)
        ]
        if not kept_ns:
            raise ConversationNotFound
        return max(kept_ns)

    # ---- inside --------------------------------------------------------------------------

    def _must_wait(self, key: ConversationKey, points: Sequence[bytes], now_ns: int) -> bool:
        if key not in self._lines:
            return False
        self.expire(now_ns)  # its own call may be late
        line = self._lines.get(key)
        if line is None or len(line.waiting) >= self._limits.waiting:
            return False
        return line.must_wait(points)

    def _count_in(self, turn: Turn) -> _Line:
        turn.session.turns[turn.id] = turn
        line = self._lines.get(turn.key)
        if line is None:
            line = self._lines[turn.key] = _Line()
        line.add(turn)
        return line

    def _settle(self, turn: Turn, now_ns: int) -> None:
        """The grant of a turn that ended has come, or is given up."""
        self._deadlines.disarm(turn)
        line = self._lines[turn.key]
        line.awaited -= 1
        self._leave(turn, line, now_ns)

    def _leave(self, turn: Turn, line: _Line, now_ns: int) -> None:
        line.remove(turn)
        if line.count == 0:
            del self._lines[turn.key]
        elif line.waiting:
            self._answer_waiting(line, now_ns)

    def _answer_waiting(self, line: _Line, now_ns: int) -> None:
        """Answers those of a conversation's turns that have nothing to wait for any more."""
        still = []
        for turn in line.waiting:
            if line.must_wait(turn.points):
                still.append(turn)
            else:
                self._deadlines.disarm(turn)
                self._answer(turn, now_ns)
        line.waiting = still

    def _answer(self, turn: Turn, now_ns: int) -> None:
        resolution = self._lessor.resolve(turn.key, now_ns)
        self._news.append((turn.session, _begun(turn, resolution)))


def _begun(turn: Turn, resolution: Resolution | None) -> Begun:
    extends = False
    if resolution is not None and resolution.history:
        extends = resolution.history in turn.points[1:]
    return Begun(
        turn.id,
        turn.key.conversation_id,
        turn.number,
        resolution,
        extends,
        previous=turn.previous,
    )
