"""Blocks of KV memory that retentions hold together. Sans-IO.

Turns of a conversation share the blocks of their history, and conversations of one agent those of
their instructions. Such a block is free only when all who refer to it have let it go: the
retentions, and the requests that run on it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class SharedBlocks:
    """The blocks of each retention, by its number. Its length is how many blocks are held."""

    def __init__(self) -> None:
        self._blocks: dict[int, Sequence[int]] = {}
        self._holders: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, number: int, block_ids: Sequence[int]) -> None:
        """Notes what a new retention holds."""
        assert number not in self._blocks
        self._blocks[number] = block_ids
        self._holders.update(block_ids)

    def let_go(self, number: int) -> None:
        """Forgets a retention."""
        for block_id in self._blocks.pop(number):
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                del self._holders[block_id]

    def freed_by(self, numbers: Iterable[int], references: Callable[[int], int]) -> FreedBlocks:
        """Returns what becomes free once these are given back.

        `references` tells how many retentions and requests refer to a block.
        """
        freed = FreedBlocks(self._blocks, references)
        for number in numbers:
            freed.add(number)
        return freed


class FreedBlocks:
    """What becomes free if some retentions are given back; see victims.py's `Freed`."""

    __slots__ = ("_blocks", "_given", "_references", "count")

    def __init__(
        self, blocks: Mapping[int, Sequence[int]], references: Callable[[int], int]
    ) -> None:
        self.count = 0
        """Blocks that nobody refers to then."""
        self._blocks = blocks
        self._references = references
        self._given: Counter[int] = Counter()

    def add(self, number: int) -> None:
        """This one is given back, too."""
        for block_id in self._blocks[number]:
            self._given[block_id] += 1
            self.count += self._given[block_id] == self._references(block_id)

    def spare(self, number: int, least: int) -> bool:
        """Keeps this one after all, if `least` blocks become free without it; returns whether."""
        block_ids = self._blocks[number]
        its = sum(self._given[each] == self._references(each) for each in block_ids)
        if self.count - its < least:
            return False
        self.count -= its
        self._given.subtract(block_ids)
        return True
