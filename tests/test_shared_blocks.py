"""Blocks that several retentions hold: counted once, and free when the last one goes."""

from collections import Counter
from collections.abc import Sequence

from kvturn_connector.shared_blocks import SharedBlocks
from kvturn_connector.victims import Victims

SECOND_NS = 1_000_000_000
INSTRUCTIONS = range(500)


class Memory:
    """A pool as vLLM has it: each block with the number of those who refer to it."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.shared = SharedBlocks()
        self.victims = Victims()

    def retain(self, number: int, block_ids: Sequence[int]) -> None:
        self.references.update(block_ids)
        self.shared.hold(number, block_ids)
        self.victims.retained(number, 1, number * SECOND_NS)

    def freed_by(self, *numbers: int) -> int:
        return self.shared.freed_by(numbers, self.references.__getitem__).count

    def give_up(self, blocks: int, *on_their_way: int) -> list[int]:
        freed = self.shared.freed_by(on_their_way, self.references.__getitem__)
        chosen = self.victims.choose(blocks, 1_000 * SECOND_NS, freed)
        assert freed.count == self.freed_by(*on_their_way, *chosen)
        return chosen

    def agents(self, count: int) -> None:
        """Conversations of one agent: 500 blocks in common, 100 of its own each."""
        for number in range(1, count + 1):
            self.retain(number, [*INSTRUCTIONS, *range(number * 1_000, number * 1_000 + 100)])


def test_a_shared_block_is_held_once() -> None:
    """Whatever the number of retentions; it is held until the last one lets it go."""
    memory = Memory()
    memory.agents(20)
    assert len(memory.shared) == 500 + 20 * 100
    for number in range(1, 20):
        memory.shared.let_go(number)
    assert len(memory.shared) == 500 + 100
    memory.shared.let_go(20)
    assert len(memory.shared) == 0


def test_only_what_nobody_else_refers_to_becomes_free() -> None:
    """Other retentions, and requests that run on the same blocks."""
    memory = Memory()
    memory.agents(2)
    assert memory.freed_by(1) == 100
    assert memory.freed_by(1, 2) == 500 + 2 * 100
    memory.references.update([0, 1])  # a request that begins as they do
    assert memory.freed_by(1, 2) == 498 + 2 * 100


def test_enough_is_given_up_at_once_although_retentions_share() -> None:
    """400 blocks take four conversations that free 100 each, not one of 600."""
    memory = Memory()
    memory.agents(20)
    assert memory.give_up(400) == [1, 2, 3, 4]
    for number in (1, 2, 3, 4):
        memory.victims.ended(number, 1_000 * SECOND_NS)
    assert memory.give_up(400, 1, 2, 3, 4) == []
    assert memory.give_up(401, 1, 2, 3, 4) == [5]


def test_what_frees_nothing_by_itself_is_spared_where_others_free_enough() -> None:
    """An old conversation whose blocks all belong to a newer one, too."""
    memory = Memory()
    memory.retain(1, range(100))
    memory.retain(2, range(1_000, 1_300))
    memory.retain(3, range(200))
    assert memory.give_up(300) == [2]
    assert memory.give_up(301) == [2, 3]
    assert memory.give_up(401) == [1, 2, 3]
