"""One thread, one random generator, integer time: events in a total order, and nodes with clocks.

Time in the world is true time, in nanoseconds from 0. No node knows it: each reads its own clock,
which runs too fast or too slow and started at some other number.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 1_000_000
S = 1_000_000_000
_PPM = 1_000_000
EVENTS_MAX = 200_000
"""More than any world needs."""


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, promise: str, story: str, lease_id: str = "") -> None:
        super().__init__(f"{promise}: {story}" + (f" [lease {lease_id}]" if lease_id else ""))
        self.promise = promise
        self.lease_id = lease_id


class World:
    """The heap of events and the clock of the universe."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.random = Random(seed)
        self.now_ns = 0
        self.events = 0
        self.log: list[str] | None = [] if traced else None
        self._sequence = 0  # ties are broken by the order of scheduling
        self._heap: list[tuple[int, int, Node | None, int, Callable[..., Any], Any]] = []

    def push(self, t_ns: int, node: Node | None, action: Callable[..., Any], *args: Any) -> None:
        """Schedules an event. One of a node waits while the node is paused, and dies with it."""
        self._sequence += 1
        epoch = 0 if node is None else node.epoch
        t_ns = max(t_ns, self.now_ns)
        heapq.heappush(self._heap, (t_ns, self._sequence, node, epoch, action, args))

    def run(self, until_ns: int) -> None:
        """Runs all events up to and including `until_ns`."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            t_ns, _, node, epoch, action, args = heapq.heappop(heap)
            self.now_ns = t_ns
            if node is not None:
                if epoch != node.epoch or not node.up:
                    continue
                if node.paused_until_ns > t_ns:
                    self.push(node.paused_until_ns, node, action, *args)
                    continue
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Violation("L3", "the world goes round in circles")
            if self.log is not None:
                name = "world" if node is None else node.name
                self.log.append(f"{t_ns / S:11.6f} {name:>4} {action.__name__}")
            action(*args)
        self.now_ns = until_ns

    def note(self, who: str, what: str, *args: object) -> None:
        """Writes a line into the event log, if there is one; `what` takes args by `%`."""
        if self.log is not None:
            self.log.append(f"{self.now_ns / S:11.6f} {who:>4} | " + (what % args))


class Node:
    """A process on a machine with a clock. Its events die with a crash and wait in a pause."""

    def __init__(self, world: World, name: str, drift_ppm: int = 0, offset_ns: int = 0) -> None:
        self.world = world
        self.name = name
        self.epoch = 0
        """Counts restarts."""
        self.up = True
        self.paused_until_ns = 0
        self.stalled_until_ns = 0
        """End of its last pause."""
        self.lateness_ns = 0
        """Timers come up to so much late."""
        self._rate = _PPM + drift_ppm
        self._offset_ns = offset_ns

    def clock_ns(self, t_ns: int | None = None) -> int:
        """Returns what the node's clock shows, now or at a true time."""
        t_ns = self.world.now_ns if t_ns is None else t_ns
        return self._offset_ns + t_ns * self._rate // _PPM

    def true_ns(self, clock_ns: int) -> int:
        """Returns the first true time at which the clock shows at least `clock_ns`."""
        return -((self._offset_ns - clock_ns) * _PPM // self._rate)

    def at_clock(self, clock_ns: int, action: Callable[..., Any], *args: Any) -> None:
        """Sets a timer by the node's own clock; it may come late, never early."""
        t_ns = self.true_ns(clock_ns)
        if self.lateness_ns:
            t_ns += int(self.world.random.random() * self.lateness_ns)
        self.world.push(t_ns, self, action, *args)

    def after(self, span_ns: int, action: Callable[..., Any], *args: Any) -> None:
        """Schedules an own event in a true span of time."""
        self.world.push(self.world.now_ns + span_ns, self, action, *args)

    def pause(self, span_ns: int) -> None:
        """Stops the process; its clock goes on."""
        self.paused_until_ns = max(self.paused_until_ns, self.world.now_ns + span_ns)
        self.stalled_until_ns = max(self.stalled_until_ns, self.paused_until_ns)

    def crash(self) -> None:
        """Ends the process; all its memory and all its events are lost."""
        self.up = False
        self.epoch += 1
        self.paused_until_ns = 0

    def restart(self) -> None:
        """Begins the process anew; what was sent to it while it was down is lost."""
        self.up = True
        self.epoch += 1
