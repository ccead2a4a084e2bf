"""The turns of a router's session with the lease service. Sans-IO.

The shell opens a stream, sends what `open` returns, feeds every message to
`receive`, sends what `take` gathers, calls `expire` at `next_deadline_ns`, and
`close` when the stream ends. Turns go on through all of that: a new session
begins with those that are in flight.

A turn waits for its answer at most until its deadline. Once a deadline has
passed without a word of the lease service since the question, no turn waits
any more (`answering` is false) until there is a word again, so that a frozen
lease service costs one deadline and not one per turn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvturn.recognition import POINTS_MAX
from kvturn.span_wire import SPAN_NAME_BYTES
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.choice.plan import Resolution
from kvturn_router.leases.session_wire import (
    begin_turn,
    end_turn,
    router_hello,
    session_request,
    turn_report,
)
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict, verdict_named

_LONGEST_READ_MS: Final = 3_000
"""Longest read where the lease service does not say."""

_GRANT_WAIT_SHARE: Final = 0.6
"""Of the question deadline: how long the lease service may wait for a grant on its way."""

_VERDICTS: Final = {
    number: verdict_named(name.removeprefix("VERDICT_").lower())
    for name, number in common_pb2.Verdict.items()
}


class Retained(NamedTuple):
    """A turn's retention was granted a lease. Tokens; 0 where not known."""

    token_count: int
    prompt_tokens: int
    local_cached_tokens: int


class SessionTurn:
    """One turn in flight, as the lease service knows it.

    `conversation_id` is the id that was asked with until the answer brings the
    right one, `number` the turn's number in its conversation, 0 until then.
    Both are taken from an answer that comes too late for the plan, too.
    `resolution` is None while the turn may still wait for one.
    """

    __slots__ = (
        "asked_ns",
        "conversation_id",
        "key",
        "number",
        "on_resolved",
        "on_retained",
        "points",
        "previous",
        "recognise",
        "resolution",
        "reuse",
        "session",
        "trace",
        "turn_id",
    )

    def __init__(
        self,
        turn_id: int,
        key: ConversationKey,
        points: Sequence[bytes],
        recognise: bool,
        reuse: bool,
        on_retained: Callable[[Retained], None] | None,
        asked_ns: int,
        trace: bytes,
    ) -> None:
        self.turn_id = turn_id
        self.key = key
        self.points = points
        self.recognise = recognise
        self.reuse = reuse
        self.conversation_id = key.conversation_id
        self.number = 0
        self.resolution: Resolution | None = None
        self.on_resolved: Callable[[], None] | None = None
        """Called once `resolution` is there."""
        self.on_retained = on_retained
        self.asked_ns = asked_ns
        self.trace = trace
        self.previous = b""
        """Names the span of the conversation's turn before it, empty if there is no such."""
        self.session = 0
        """Number of the session in which it was told last."""


class SessionTurns:
    """All turns in flight, and what there is to say about them.

    `question_deadline_ms` bounds what a turn waits for its answer.
    """

    def __init__(self, *, router_id: str, question_deadline_ms: int, version: str = "") -> None:
        self.answering = True
        """Whether turns wait for an answer."""
        self.longest_read_ms = _LONGEST_READ_MS
        self.refused = ""
        """Reason of the last refusal of a turn, empty if there was none."""
        self._router_id = router_id
        self._version = version
        self._deadline_ns = question_deadline_ms * 1_000_000
        self._grant_wait_ms = round(question_deadline_ms * _GRANT_WAIT_SHARE)
        self._verdict = Verdict.LEASE_SERVICE_UNREACHABLE
        self._last_id = 0
        self._session = 0
        self._open = False
        self._heard_ns = -1
        self._turns: dict[int, SessionTurn] = {}
        self._waiting: deque[SessionTurn] = deque()
        self._begins: dict[int, SessionTurn] = {}
        self._ends: list[bytes] = []

    def __len__(self) -> int:
        """Turns in flight."""
        return len(self._turns)

    # --- the router's side ------------------------------------------------------------------------

    def begin(
        self,
        key: ConversationKey,
        points: Sequence[bytes],
        now_ns: int,
        *,
        recognise: bool,
        reuse: bool,
        on_retained: Callable[[Retained], None] | None = None,
        trace: bytes = b"",
    ) -> SessionTurn:
        """Takes a turn that begins; `end` must follow. As `RouterSession.begin`."""
        self._last_id += 1
        turn = SessionTurn(
            self._last_id, key, points[:POINTS_MAX], recognise, reuse, on_retained, now_ns, trace
        )
        self._turns[turn.turn_id] = turn
        if self._open:
            self._begins[turn.turn_id] = turn
        if not reuse:
            turn.resolution = Resolution(Verdict.TURNED_OFF)
        elif not self.answering:
            turn.resolution = Resolution(self._verdict)
        else:
            self._waiting.append(turn)
        return turn

    def end(self, turn: SessionTurn, *, retains: bool, report: TurnReport | None) -> None:
        """Takes the end of a turn, as `RouterSession.end`; a second one changes nothing."""
        if self._turns.pop(turn.turn_id, None) is None:
            return
        if turn.resolution is None:
            # It is answered no more, which is no silence.
            turn.resolution = Resolution(Verdict.LEASE_SERVICE_UNREACHABLE)
        if self._begins.pop(turn.turn_id, None) is not None:
            return  # Nobody has heard of it.
        if not self._open or turn.session != self._session:
            return  # It ended with the session in which it was told.
        told = None if report is None else turn_report(turn.conversation_id, report)
        self._ends.append(end_turn(turn.turn_id, retains=retains, report=told))

    def expire(self, now_ns: int) -> int | None:
        """Ends the waits that are over.

        If the lease service has fallen silent by that, returns when the turn began that shows it.
        """
        silent_since_ns = None
        while self._waiting:
            turn = self._waiting[0]
            if turn.resolution is None:
                if now_ns < turn.asked_ns + self._deadline_ns:
                    break
                if self.answering and self._heard_ns < turn.asked_ns:
                    silent_since_ns = turn.asked_ns
                    self.answering = False
                    self._verdict = Verdict.LEASE_SERVICE_UNREACHABLE
                _resolve(turn, Resolution(Verdict.LEASE_SERVICE_UNREACHABLE))
            self._waiting.popleft()
        return silent_since_ns

    def next_deadline_ns(self) -> int | None:
        """When `expire` wants to be called next; None while nobody waits."""
        while self._waiting and self._waiting[0].resolution is not None:
            self._waiting.popleft()
        return self._waiting[0].asked_ns + self._deadline_ns if self._waiting else None

    # --- the stream's side ------------------------------------------------------------------------

    def open(self) -> bytes:
        """Begins a session; returns its first message, a RouterSessionRequest.

        Turns that still wait for an answer are asked again, the others are told.
        """
        self._session += 1
        self._open = True
        self._begins.clear()
        self._ends.clear()
        asked: list[bytes] = []
        in_flight: list[bytes] = []
        for turn in self._turns.values():
            (asked if turn.resolution is None else in_flight).append(self._told(turn))
        return session_request(asked, (), router_hello(self._router_id, in_flight, self._version))

    def _told(self, turn: SessionTurn) -> bytes:
        turn.session = self._session
        key = turn.key
        if turn.conversation_id != key.conversation_id:
            key = key._replace(conversation_id=turn.conversation_id)  # it is final
        return begin_turn(
            turn.turn_id,
            key,
            recognise=turn.recognise,
            points=turn.points,
            wait_ms=self._grant_wait_ms if turn.reuse else 0,
            reuse=turn.reuse,
            number=turn.number,
            trace=turn.trace,
        )

    def close(self) -> None:
        """The session ended. Turns that wait go on waiting: the next one may come in time."""
        self._open = False
        self._begins.clear()
        self._ends.clear()

    def nobody_answers(self, verdict: Verdict) -> None:
        """There is nobody to ask: no turn waits until a session has begun."""
        self.answering = False
        self._verdict = verdict
        while self._waiting:
            turn = self._waiting.popleft()
            if turn.resolution is None:
                _resolve(turn, Resolution(verdict))

    def take(self) -> bytes | None:
        """Returns what is to be said now, a RouterSessionRequest, None if nothing is."""
        if not self._begins and not self._ends:
            return None
        request = session_request(map(self._told, self._begins.values()), self._ends)
        self._begins.clear()
        self._ends.clear()
        return request

    def receive(self, response: lease_pb2.RouterSessionResponse, now_ns: int) -> None:
        """Takes one message of the lease service, but for what it says of engines."""
        self._heard_ns = now_ns
        self.answering = True
        if response.HasField("welcome"):
            longest_ms = response.welcome.longest_read.ToMilliseconds()
            self.longest_read_ms = longest_ms or _LONGEST_READ_MS
        for begun in response.turns:
            self._on_begun(begun)
        for retained in response.retained:
            self._on_retained(retained)

    def _on_begun(self, begun: lease_pb2.TurnBegun) -> None:
        turn = self._turns.get(begun.turn_id)
        if turn is None:
            return
        if begun.refused:
            self.refused = begun.refused
            if turn.resolution is None:
                _resolve(turn, Resolution(Verdict.LEASE_SERVICE_UNREACHABLE))
            return
        turn.number = begun.turn
        if turn.trace and begun.HasField("previous"):
            turn.previous = _named(begun.previous)
        if begun.conversation_id:
            turn.conversation_id = begun.conversation_id
        if turn.resolution is None:
            _resolve(turn, self._resolution(begun))

    def _resolution(self, begun: lease_pb2.TurnBegun) -> Resolution:
        leased = bool(begun.lease_id)
        return Resolution(
            None if leased else _VERDICTS.get(begun.verdict) or Verdict.NO_LEASE,
            begun.lease_id,
            begun.http_address,
            self.longest_read_ms if leased else 0,
            token_count=begun.token_count,
            prompt_tokens=begun.prompt_tokens,
            extends=begun.extends,
            conversation_id=begun.conversation_id,
            turn=begun.turn,
            engine_id=begun.engine_id,
        )

    def _on_retained(self, retained: lease_pb2.TurnRetained) -> None:
        turn = self._turns.get(retained.turn_id)
        if turn is not None and turn.on_retained is not None:
            turn.on_retained(
                Retained(retained.token_count, retained.prompt_tokens, retained.local_cached_tokens)
            )


def _named(trace: lease_pb2.TurnTrace) -> bytes:
    name = trace.trace_id + trace.span_id
    return name if len(name) == SPAN_NAME_BYTES else b""


def _resolve(turn: SessionTurn, resolution: Resolution) -> None:
    turn.resolution = resolution
    if turn.on_resolved is not None:
        turn.on_resolved()
