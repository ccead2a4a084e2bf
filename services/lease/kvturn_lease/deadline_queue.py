"""The deadlines of a core's items, the earliest first.

Each item has one deadline. Moving it costs O(log n) when it moves earlier and nothing when it
moves later, which is what every sign of life does: the old entry stays and wakes the owner
too early, and the owner arms the item again. Entries that were overtaken are skipped, and
thrown out together once they outnumber the armed items, so the heap never holds more than
twice as many entries as there are armed items, and a few.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

NEVER_NS = 2**63 - 1
"""A deadline that does not come."""

_SLACK_ENTRIES = 64


class Timed(Protocol):
    """Something with a deadline; `timer_ns` belongs to the queue and starts as NEVER_NS."""

    timer_ns: int


T = TypeVar("T", bound=Timed)


class DeadlineQueue(Generic[T]):
    """A heap of items by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._tie = 0  # equal deadlines come out in the order they were armed in
        self._armed = 0

    def __len__(self) -> int:
        """Entries in memory, overtaken ones included."""
        return len(self._heap)

    def arm(self, item: T, deadline_ns: int) -> None:
        """Makes sure that the item comes out at or before `deadline_ns` (NEVER_NS: no need).

        It may come out earlier than its latest deadline; arm it again then.
        """
        if deadline_ns >= item.timer_ns:
            return
        if item.timer_ns == NEVER_NS:
            self._armed += 1
        item.timer_ns = deadline_ns
        self._tie += 1
        heapq.heappush(self._heap, (deadline_ns, self._tie, item))
        if len(self._heap) > 2 * self._armed + _SLACK_ENTRIES:
            self._throw_out_overtaken()

    def disarm(self, item: T) -> None:
        """Forgets the item's deadline. Harmless if it has none."""
        if item.timer_ns != NEVER_NS:
            self._armed -= 1
            item.timer_ns = NEVER_NS

    def next_ns(self) -> int | None:
        """Returns when the next item comes out, None if none is armed."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].timer_ns:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ns: int) -> T | None:
        """Takes out one item whose deadline is at or before `now_ns`; it is disarmed."""
        due_ns = self.next_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        item = heapq.heappop(self._heap)[2]
        self.disarm(item)
        return item

    def _throw_out_overtaken(self) -> None:
        self._heap = [entry for entry in self._heap if entry[0] == entry[2].timer_ns]
        heapq.heapify(self._heap)
