"""The order of victims without learning, for comparison: what was retained longest ago goes first.

A retention is used once, when it is read, so this is also the least recently used one.
"""

from __future__ import annotations


class OldestFirst:
    """Stands in for `kvturn_connector.victims.Victims`."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}

    def retained(self, number: int, blocks: int, turn: int, now_ns: int) -> None:
        """Adds a retention."""
        self._blocks[number] = blocks

    def outlook(self, number: int, outlook: int, now_ns: int) -> None:
        """Makes no difference here."""

    def consumed(self, number: int, now_ns: int) -> None:
        """Removes a retention."""
        self._blocks.pop(number, None)

    def ended(self, number: int, now_ns: int) -> None:
        """Removes a retention."""
        self._blocks.pop(number, None)

    def choose(self, blocks_wanted: int, now_ns: int) -> list[int]:
        """Returns the oldest retentions that have so many blocks together."""
        chosen = []
        for number, blocks in self._blocks.items():
            if blocks_wanted <= 0:
                break
            chosen.append(number)
            blocks_wanted -= blocks
        return chosen
