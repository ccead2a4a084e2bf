"""The order of victims without learning, for comparison: what was retained longest ago goes first.

A retention is used once, when it is read, so this is also the least recently used one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvturn_connector.victims import Freed


class OldestFirst:
    """Stands in for `kvturn_connector.victims.Victims`."""

    def __init__(self) -> None:
        self._kept: dict[int, None] = {}

    def retained(self, number: int, turn: int, now_ns: int) -> None:
        """Adds a retention."""
        self._kept[number] = None

    def outlook(self, number: int, outlook: int, now_ns: int) -> None:
        """Makes no difference here."""

    def consumed(self, number: int, now_ns: int) -> None:
        """Removes a retention."""
        self._kept.pop(number, None)

    def ended(self, number: int, now_ns: int) -> None:
        """Removes a retention."""
        self._kept.pop(number, None)

    def choose(self, blocks_wanted: int, now_ns: int, freed: Freed) -> list[int]:
        """Returns the oldest retentions that have so many blocks together."""
        chosen = []
        for number in self._kept:
            if freed.count >= blocks_wanted:
                break
            chosen.append(number)
            freed.add(number)
        return chosen
