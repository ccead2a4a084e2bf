"""Medians with their range, percentiles, and the tables that show them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over rounds: its median, and the least and the most seen."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarizes at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int = 0) -> str:
        """Returns "median (least-most)"."""
        median, least, most = (
            f"{value:,.{digits}f}" for value in (self.median, self.least, self.most)
        )
        return f"{median} ({least}-{most})"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Returns the value that `fraction` of them do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(fraction * len(ranked)))]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a heading, with what must be said about them."""

    title: str
    notes: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Returns it as Markdown that can also be read as it is."""
        widths = [
            max(len(row[index]) for row in (self.columns, *self.rows))
            for index in range(len(self.columns))
        ]
        lines = [
            "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
            for row in (self.columns, *self.rows)
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([f"## {self.title}", "", self.notes, "", *lines, ""])
