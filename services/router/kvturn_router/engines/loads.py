"""The engines of one role, by how much they have to do.

`least` is asked once or twice per turn, so it must cost the same for two
engines and for two hundred: engines that can be given a turn stand in one line
per number of requests in flight, in the order in which they came to that
number. The head of the shortest line's is the answer: of equals, the one that
has waited longest for a turn. Sans-IO.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Loaded(Protocol):
    """What a `Loads` needs to know of an engine."""

    @property
    def in_flight(self) -> int:
        """Requests that it has been given and has not answered."""

    @property
    def open(self) -> bool:
        """Whether it may be given a new turn: usable, not draining, not full."""


E = TypeVar("E", bound=Loaded)


class Loads(Iterable[E]):
    """Engines of one role, live: they may come, go and change at any time."""

    def __init__(self) -> None:
        self.turned: Callable[[], None] = lambda: None
        """Called when an engine can be given a turn that could not, or the reverse."""
        # A dict keeps the order of arrival and lets go from the middle.
        self._engines: dict[E, int | None] = {}
        self._lines: dict[int, dict[E, None]] = {}
        self._least = 0
        # Engines that have come to another number and are not in its line yet, in that order.
        self._counted: dict[E, None] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[E]:
        """All engines of the role, in the order in which they came."""
        return iter(list(self._engines))

    def __contains__(self, engine: object) -> bool:
        return engine in self._engines

    def add(self, engine: E) -> None:
        """Takes an engine up; one that is there already stays as it is."""
        if engine not in self._engines:
            self._engines[engine] = None
            self.changed(engine)

    def remove(self, engine: E) -> None:
        """Gives it no turn any more."""
        self._counted.pop(engine, None)
        line = self._engines.pop(engine, None)
        if line is not None:
            self._leave(engine, line)
            self.turned()

    def counted(self, engine: E) -> None:
        """Must be called after each change of an engine's `in_flight` that leaves `open` as it is.

        It changes lines when somebody asks: most engines are given a turn and
        have answered another by then.
        """
        counted = self._counted
        counted.pop(engine, None)
        counted[engine] = None

    def changed(self, engine: E) -> None:
        """Must be called after each other change of an engine's `in_flight` or `open`."""
        if self._counted:
            self._line_up()
        if engine not in self._engines:
            return
        line = self._engines[engine]
        now = engine.in_flight if engine.open else None
        if now == line:
            return
        if line is not None:
            self._leave(engine, line)
        self._engines[engine] = now
        if now is not None:
            self._join(engine, now)
        if (now is None) != (line is None):
            self.turned()

    def least(self, tried: Collection[E] = ()) -> E | None:
        """Returns the open engine with the fewest requests in flight, None if there is none.

        Of equals, the one that has not been given one for longest. Leaves out
        `tried`.
        """
        if self._counted:
            self._line_up()
        if not self._lines:
            return None
        if not tried:
            return next(iter(self._lines[self._least]))
        for number in sorted(self._lines):
            for engine in self._lines[number]:
                if engine not in tried:
                    return engine
        return None

    def _line_up(self) -> None:
        engines = self._engines
        for engine in self._counted:
            line = engines.get(engine)
            if line is not None:
                self._leave(engine, line)
                engines[engine] = engine.in_flight
                self._join(engine, engine.in_flight)
        self._counted.clear()

    def _join(self, engine: E, number: int) -> None:
        lines = self._lines
        if not lines or number < self._least:
            self._least = number
        if number in lines:
            lines[number][engine] = None
        else:
            lines[number] = {engine: None}

    def _leave(self, engine: E, number: int) -> None:
        line = self._lines[number]
        del line[engine]
        if line:
            return
        del self._lines[number]
        if number == self._least and self._lines:
            # Nearly always the next number: that of the engine just given a turn.
            self._least = number + 1 if number + 1 in self._lines else min(self._lines)


class Others(Generic[E]):
    """The engines of one role without some of them."""

    def __init__(self, loads: Loads[E], without: Collection[E]) -> None:
        self._loads = loads
        self._without = without

    def least(self, tried: Collection[E] = ()) -> E | None:
        """As `Loads.least`."""
        return self._loads.least({*self._without, *tried})
