"""Turns that wait for an engine with room. Sans-IO.

With a limit on what an engine is given at once there may be no engine for a
turn right now. Then it waits in the line of the role that it misses. Whoever
came first is served first, and nobody overtakes in a line: turns that miss a
prefill engine do not keep from decode those that need nothing else. The lines
are bounded together and so is the wait; who finds no place, or waits too long,
is to come again later.

A turn brings a function that claims what it needs, or raises NoRoom if it cannot
have it yet. It is called in its turn, and never again once it has claimed or
raised anything else.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Generic, TypeVar

C = TypeVar("C")

NS_PER_S: Final = 1_000_000_000


class NoPlace(Exception):
    """The lines are full, or the wait was too long. The message is one line for the client."""


class NoRoom(Exception):
    """All engines of a role that a turn needs are full."""

    def __init__(self, role: str) -> None:
        super().__init__(f"all {role} engines are full")
        self.role = role


class Waiting(Generic[C]):
    """A turn in line.

    `done` is called once it has claimed or cannot any more, not if `leave` was
    called before; then either `claim` or `refusal` is there.
    """

    __slots__ = ("claim", "done", "number", "refusal", "role", "since_ns", "try_to")

    def __init__(self, try_to: Callable[[], C], number: int, since_ns: int) -> None:
        self.try_to = try_to
        self.number = number
        self.since_ns = since_ns
        self.role = ""
        """In whose line it stands, or stood last."""
        self.done: Callable[[], None] = lambda: None
        self.claim: C | None = None
        self.refusal: Exception | None = None

    def result(self) -> C | None:
        """Returns what it has claimed, None if nothing yet. Raises its refusal."""
        if self.refusal is not None:
            raise self.refusal
        return self.claim


class WaitingRoom:
    """One line for each of `roles`.

    A turn that needs an engine of a role needs one of each role named before it
    as well: whoever misses a later role need not be asked while an earlier one
    is full. `places` is how many may wait in all, at least 0; `patience_ns` the
    longest wait.
    """

    def __init__(self, *, roles: Sequence[str], places: int, patience_ns: int) -> None:
        assert places >= 0
        self._rank = {role: rank for rank, role in enumerate(roles)}
        self._lines: dict[str, deque[Waiting[Any]]] = {role: deque() for role in roles}
        self.places = places
        self._patience_ns = patience_ns
        self._came = 0
        self._serving = False

    def __len__(self) -> int:
        """How many wait."""
        return sum([len(line) for line in self._lines.values()])

    def depths(self) -> dict[str, int]:
        """Returns how many wait in the line of each role."""
        return {role: len(line) for role, line in self._lines.items()}

    def claim(self, try_to: Callable[[], C], now_ns: int) -> Waiting[C]:
        """Claims at once if there is room, else stands in line.

        That overtakes nobody: who waits was asked since there last came room.
        Raises NoPlace if there are as many in line as may be, and what `try_to`
        raises but NoRoom.
        """
        self._came += 1
        waiting = Waiting(try_to, self._came, now_ns)
        try:
            waiting.claim = try_to()
        except NoRoom as missing:
            if len(self) >= self.places:
                raise NoPlace(
                    f"All engines are busy, and {len(self)} turns wait for one, which is the most"
                ) from None
            self._stand(waiting, missing.role)
        return waiting

    def leave(self, waiting: Waiting[Any]) -> None:
        """Ends a wait early."""
        line = self._lines.get(waiting.role)
        if line is not None and waiting in line:
            line.remove(waiting)

    def serve(self) -> None:
        """To be called whenever what can be claimed has changed; serves those in front.

        A claim may call it again: that changes nothing.
        """
        if self._serving:
            return
        self._serving = True
        try:
            # Each turn changes its line once at most, and each line ends this once.
            heads = dict(self._lines)
            while waiting := self._first(heads.values()):
                self._ask(waiting, heads)
        finally:
            self._serving = False

    def expire(self, now_ns: int) -> None:
        """Ends the waits that are too long."""
        for line in self._lines.values():
            while line and line[0].since_ns + self._patience_ns <= now_ns:
                waiting = line.popleft()
                seconds = self._patience_ns / NS_PER_S
                waiting.refusal = NoPlace(f"All engines have been busy for {seconds:g} s")
                waiting.done()

    def next_deadline_ns(self) -> int | None:
        """When `expire` wants to be called next; None while nobody waits."""
        first = self._first(self._lines.values())
        return None if first is None else first.since_ns + self._patience_ns

    @staticmethod
    def _first(lines: Collection[deque[Waiting[Any]]]) -> Waiting[Any] | None:
        return min([line[0] for line in lines if line], key=_number, default=None)

    def _ask(self, waiting: Waiting[Any], heads: dict[str, deque[Waiting[Any]]]) -> None:
        """Serves the head of a line, or has it step aside; takes lines that wait from `heads`."""
        role = waiting.role
        try:
            waiting.claim = waiting.try_to()
        except NoRoom as missing:
            heads.pop(missing.role, None)
            if self._rank[missing.role] > self._rank[role]:
                self._lines[role].popleft()
                self._stand(waiting, missing.role)
            else:
                heads.pop(role, None)  # All behind it miss what it misses.
            return
        except Exception as error:
            # It is for whoever waits, not for whoever made room.
            waiting.refusal = error
        self._lines[role].popleft()
        waiting.done()

    def _stand(self, waiting: Waiting[Any], role: str) -> None:
        """Puts a turn in a line, before those that came after it: nearly always there are none."""
        line = self._lines[role]
        place = len(line)
        while place and line[place - 1].number > waiting.number:
            place -= 1
        line.insert(place, waiting)
        waiting.role = role


def _number(waiting: Waiting[Any]) -> int:
    return waiting.number
