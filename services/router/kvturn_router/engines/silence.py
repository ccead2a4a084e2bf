"""One timer for all answers that an engine owes.

A timer for each request would cost about as much as writing the request, and
nearly all of them would be cancelled. This one is set to the earliest moment at
which any answer could have been silent for too long, and looks at all of them
then.
"""

import asyncio
import math
from typing import Protocol


class Owed(Protocol):
    """Something that must not be silent for too long."""

    def silent_at(self, now: float) -> float:
        """Returns when it will have been silent for too long, as things stand."""

    def give_up(self) -> None:
        """Called when that moment has come; it is watched no more."""


class SilenceWatch:
    """Watches what is owed. Times are the event loop's."""

    def __init__(self) -> None:
        self._owed: set[Owed] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer goes off

    def add(self, owed: Owed, due: float) -> None:
        """Watches from now on; `due` is when it will have been silent for too long."""
        self._owed.add(owed)
        if due < self._due:
            self._set(due)

    def discard(self, owed: Owed) -> None:
        """Watches no more."""
        self._owed.discard(owed)

    def stop(self) -> None:
        """Watches nothing any more."""
        self._owed.clear()
        self._due = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._due = math.inf
        now = asyncio.get_running_loop().time()
        late = [owed for owed in self._owed if owed.silent_at(now) <= now]
        self._owed.difference_update(late)
        for owed in late:
            owed.give_up()
        due = min((owed.silent_at(now) for owed in self._owed), default=math.inf)
        if due < self._due:
            self._set(due)
