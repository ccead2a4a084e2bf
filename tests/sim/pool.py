"""KV blocks of one decode process: each has one owner, and is written anew by the next one."""

from __future__ import annotations

from sim.world import Violation


class Pool:
    """Blocks by id. What was given back last is taken first, so that stale reads show."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.free = list(range(blocks))
        self.generation = [0] * blocks
        self._owned = [False] * blocks

    def take(self, count: int) -> list[int]:
        """Hands out blocks, which their new owner overwrites. `count` are free."""
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            if self._owned[block]:
                raise Violation("S1", f"block {block} was handed out while owned")
            self._owned[block] = True
            self.generation[block] += 1
        return taken

    def give(self, blocks: list[int]) -> None:
        """Takes blocks back from their owner."""
        for block in blocks:
            if not self._owned[block]:
                raise Violation("S1", f"block {block} was given back twice")
            self._owned[block] = False
        self.free.extend(blocks)
