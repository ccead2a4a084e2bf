"""Broken variants of the cores of routers' sessions. Each must be caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvturn.recognition import Key, Recognition
from kvturn_lease.lessor import Lessor
from kvturn_lease.routers import Retained, Routers, RouterSession, Turn
from kvturn_router.leases.session_turns import SessionTurn, SessionTurns
from sim.router_world import RouterCores

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvturn_lease.conversation import Conversation, ConversationKey
    from kvturn_lease.routers import Beginning, News


class _TheDeadGoOn(Routers):
    """Turns of a session that ended stay in flight."""

    def close(self, session: RouterSession, now_ns: int) -> None:
        session.turns.clear()
        super().close(session, now_ns)


class _BeginsEmpty(Routers):
    """Turns that a router brings to its next session are not counted."""

    def open(self, in_flight: Iterable[Beginning], now_ns: int) -> RouterSession:
        del in_flight
        return super().open((), now_ns)


class _CountsOutTwice(Routers):
    """The end of a turn ends another one, too."""

    def end(self, session: RouterSession, turn_id: int, retains: bool, now_ns: int) -> Turn | None:
        turn = super().end(session, turn_id, retains, now_ns)
        if turn is not None:
            self._lessor.touch(turn.key, -1, now_ns)
        return turn


class _TellsNoGrant(Routers):
    """Nobody hears of the grant of a turn."""

    def drain(self) -> list[tuple[RouterSession, News]]:
        return [each for each in super().drain() if not isinstance(each[1], Retained)]


class _WaitsForEver(Routers):
    """A turn waits for a grant that does not come."""

    def expire(self, now_ns: int) -> None:
        ended = []
        while (turn := self._deadlines.pop_due(now_ns)) is not None:
            ended += [turn] if turn.ended else []
        for turn in ended:
            self._settle(turn, now_ns)


class _HearsOfNoEnd(Recognition):
    """A branch is in flight for ever."""

    def ended(self, key: Key) -> None:
        del key


class _SilenceIsIdle(Lessor):
    """A turn in flight keeps nothing alive."""

    def _idle_from_ns(self, conversation: Conversation) -> int:
        in_flight, conversation.turns_in_flight = conversation.turns_in_flight, 0
        try:
            return super()._idle_from_ns(conversation)
        finally:
            conversation.turns_in_flight = in_flight


class _NumbersAnew(Lessor):
    """A new term gives numbers that turns in flight have."""

    def take_over_turn(self, key: ConversationKey, number: int, now_ns: int) -> None:
        del number
        super().take_over_turn(key, 0, now_ns)


class _LeavesBehind(SessionTurns):
    """A router's next session does not begin with its turns."""

    def open(self) -> bytes:
        turns = self._turns
        self._turns = {number: each for number, each in turns.items() if each.resolution is None}
        try:
            return super().open()
        finally:
            self._turns = turns


class _EndsUnheard(SessionTurns):
    """A router takes its turns along, and does not say when they end."""

    def _told(self, turn: SessionTurn) -> bytes:
        session, first = turn.session, not turn.session
        told = super()._told(turn)
        if not first:
            turn.session = session
        return told


MUTANTS = {
    "a dead router's turns go on": RouterCores(routers=_TheDeadGoOn),
    "turns that a router brings are not counted": RouterCores(routers=_BeginsEmpty),
    "an end counts twice": RouterCores(routers=_CountsOutTwice),
    "no grant is told": RouterCores(routers=_TellsNoGrant),
    "a wait for a grant has no end": RouterCores(routers=_WaitsForEver),
    "recognition hears of no end": RouterCores(recognition=_HearsOfNoEnd),
    "a turn in flight is idle": RouterCores(lessor=_SilenceIsIdle),
    "a new term numbers anew": RouterCores(lessor=_NumbersAnew),
    "a router leaves its turns behind": RouterCores(turns=_LeavesBehind),
    "an end in the next session is not told": RouterCores(turns=_EndsUnheard),
}
