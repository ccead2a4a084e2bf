"""Lets turns wait until an engine has room for them: the timers of `waiting.py`."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvturn.metrics import Family, Histogram
from kvturn_router.engines.fleet import DECODE, PREFILL, Fleet
from kvturn_router.engines.waiting import NoPlace, NoRoom, WaitingRoom
from kvturn_router.errors import TurnError

C = TypeVar("C")

_RETRY_AFTER_S = 1
_NS = 1e9

WAIT = Family(
    "kvturn_router_queue_seconds",
    "histogram",
    "Time that a turn waited for an engine with room, by the role that it waited for last; only "
    "turns that had to wait.",
    ("role",),
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Admission:
    """Gives turns what they claim of the fleet's engines, as `WaitingRoom` orders them.

    What they bring raises NoRoom if they cannot have it yet. `clock_ns` is CLOCK_BOOTTIME.
    """

    def __init__(self, fleet: Fleet, room: WaitingRoom, clock_ns: Callable[[], int]) -> None:
        self.room = room
        self.waits: dict[str, Histogram] = {role: WAIT.histogram() for role in (PREFILL, DECODE)}
        """By role."""
        self._clock_ns = clock_ns
        self._timer: asyncio.TimerHandle | None = None
        fleet.prefills.turned = fleet.decodes.turned = room.serve

    @staticmethod
    def claim_now(try_to: Callable[[], C]) -> C | None:
        """Returns what `try_to` claims at once; None if there is no room. Raises what it raises."""
        try:
            return try_to()
        except NoRoom:
            return None

    async def claim(self, try_to: Callable[[], C], give_back: Callable[[C], None]) -> C:
        """Returns what `try_to` claims, as soon as there is room.

        `give_back` is called if the turn is cancelled with its claim in hand.
        Raises what `try_to` raises, and TurnError 429 if it cannot wait or has
        waited too long.
        """
        try:
            waiting = self.room.claim(try_to, self._clock_ns())
            claim = waiting.result()
            if claim is not None:
                return claim
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.done = partial(_wake, done)
            self._arm()
            try:
                await done
            except asyncio.CancelledError:
                self.room.leave(waiting)
                if waiting.claim is not None:
                    give_back(waiting.claim)
                raise
            finally:
                waited_ns = self._clock_ns() - waiting.since_ns
                self.waits[waiting.role].observe(waited_ns / _NS)
            claim = waiting.result()
        except NoPlace as problem:
            raise TurnError(
                429, f"{problem}.", reason="ENGINES_BUSY", retry_after_s=_RETRY_AFTER_S
            ) from None
        assert claim is not None
        return claim

    def _arm(self) -> None:
        due_ns = self.room.next_deadline_ns()
        if self._timer is None and due_ns is not None:
            left_s = max(due_ns - self._clock_ns(), 0) / 1e9
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.room.expire(self._clock_ns())
        self._arm()


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
