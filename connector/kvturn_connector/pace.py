"""How long a D->P read takes, learned from those that were. Sans-IO."""

from __future__ import annotations

from collections import deque

READS_MAX = 16
"""Reads that are remembered."""


class ReadPace:
    """Expects of a read the best pace of the last ones.

    The best, not the average: a read is refused for its expected time only when it could not even
    then come in time, and what does come too late is discarded all the same.
    """

    def __init__(self) -> None:
        self._reads: deque[tuple[int, int]] = deque(maxlen=READS_MAX)

    def learn(self, blocks: int, read_ns: int) -> None:
        """A read of `blocks` blocks, at least 1, took `read_ns` from its posting to its end."""
        self._reads.append((blocks, read_ns))

    def expected_ns(self, blocks: int) -> int:
        """Time that a read of `blocks` blocks takes; 0 while nothing is known.

        More blocks than in a remembered read take in proportion longer, fewer take as long: a
        part of each read is latency.
        """
        return min(
            (read_ns * max(blocks, known) // known for known, read_ns in self._reads), default=0
        )
