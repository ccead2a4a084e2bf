"""Turns that wait for an engine with room. Sans-IO.

With a limit on what an engine is given at once there may be no engine for a
turn right now. Then it waits in one line with all others: whoever came first is
served first, and nobody overtakes. The line is bounded and so is the wait; who
finds no place, or waits too long, is to come again later.

A turn brings a function that claims what it needs, or returns None if it cannot
have it yet. It is called in its turn, and never again once it has claimed or
raised.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

C = TypeVar("C")

NS_PER_S: Final = 1_000_000_000


class NoPlace(Exception):
    """The line is full, or the wait was too long. The message is one line for the client."""


class Waiting(Generic[C]):
    """A turn in line.

    `done` is called once it has claimed or cannot any more, not if `leave` was
    called before; then either `claim` or `refusal` is there.
    """

    __slots__ = ("claim", "done", "refusal", "since_ns", "try_to")

    def __init__(self, try_to: Callable[[], C | None], since_ns: int) -> None:
        self.try_to = try_to
        self.since_ns = since_ns
        self.done: Callable[[], None] = lambda: None
        self.claim: C | None = None
        self.refusal: Exception | None = None

    def result(self) -> C | None:
        """Returns what it has claimed, None if nothing yet. Raises its refusal."""
        if self.refusal is not None:
            raise self.refusal
        return self.claim


class WaitingRoom(Generic[C]):
    """The line. `places` is its length, at least 0; `patience_ns` the longest wait."""

    def __init__(self, *, places: int, patience_ns: int) -> None:
        assert places >= 0
        self._places = places
        self._patience_ns = patience_ns
        self._line: deque[Waiting[C]] = deque()
        self._serving = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def claim(self, try_to: Callable[[], C | None], now_ns: int) -> Waiting[C]:
        """Claims at once if nobody waits and there is room, else stands in line.

        Raises NoPlace if the line is full, and what `try_to` raises.
        """
        waiting = Waiting(try_to, now_ns)
        if not self._line:
            waiting.claim = try_to()
            if waiting.claim is not None:
                return waiting
        if len(self._line) >= self._places:
            raise NoPlace(
                f"All engines are busy, and {len(self._line)} turns wait for one, which is the most"
            )
        self._line.append(waiting)
        return waiting

    def leave(self, waiting: Waiting[C]) -> None:
        """Ends a wait early."""
        if waiting in self._line:
            self._line.remove(waiting)

    def serve(self) -> None:
        """To be called whenever what can be claimed has changed; serves those in front.

        A claim may call it again: that changes nothing.
        """
        if self._serving:
            return
        self._serving = True
        try:
            while self._line and self._served(self._line[0]):
                self._line.popleft().done()
        finally:
            self._serving = False

    def _served(self, waiting: Waiting[C]) -> bool:
        try:
            waiting.claim = waiting.try_to()
        except Exception as error:
            # It is for whoever waits, not for whoever made room.
            waiting.refusal = error
            return True
        return waiting.claim is not None

    def expire(self, now_ns: int) -> None:
        """Ends the waits that are too long."""
        while self._line and self._line[0].since_ns + self._patience_ns <= now_ns:
            waiting = self._line.popleft()
            seconds = self._patience_ns / NS_PER_S
            waiting.refusal = NoPlace(f"All engines have been busy for {seconds:g} s")
            waiting.done()

    def next_deadline_ns(self) -> int | None:
        """When `expire` wants to be called next; None while nobody waits."""
        return self._line[0].since_ns + self._patience_ns if self._line else None
