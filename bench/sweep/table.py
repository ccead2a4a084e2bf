"""The result of a sweep: medians and spread of each cell and arm, as Markdown and CSV. No I/O."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.sweep.cell import ARMS, Cell, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Line:
    """The turns after the first of one cell in one arm."""

    cell: Cell
    arm: str
    count: int
    """Turns measured."""
    failed: int
    """Turns that failed, first ones included."""
    prompt_tokens: float
    """Median."""
    reused_tokens: float
    """Median; -1 where the driver is not told."""
    read_gb_per_s: float | None
    """Median pace of the reads; None if there was none."""
    ttft_ms: Spread
    latency_ms: Spread
    verdicts: str
    """How many turns had which verdict, the most frequent first."""


def lines(rows: Iterable[Row]) -> list[Line]:
    """Returns a line for each cell and arm that has a turn after the first which did not fail."""
    groups: dict[tuple[Cell, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell, row.arm), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], ARMS.index(item[0][1])))
    return [
        _line(cell, arm, group)
        for (cell, arm), group in ordered
        if any(row.turn > 1 and not row.error for row in group)
    ]


def _line(cell: Cell, arm: str, group: Sequence[Row]) -> Line:
    good = [row for row in group if row.turn > 1 and not row.error]
    paces = [row.read_bytes / row.read_ms / 1e6 for row in good if row.read_ms > 0]
    counted = Counter(row.verdict for row in good if row.verdict)
    return Line(
        cell=cell,
        arm=arm,
        count=len(good),
        failed=sum(bool(row.error) for row in group),
        prompt_tokens=statistics.median(row.prompt_tokens for row in good),
        reused_tokens=statistics.median(row.reused_tokens for row in good),
        read_gb_per_s=statistics.median(paces) if paces else None,
        ttft_ms=Spread.of([row.ttft_ms for row in good]),
        latency_ms=Spread.of([row.latency_ms for row in good]),
        verdicts=", ".join(f"{name} {number}" for name, number in counted.most_common()),
    )


def ratio(line: Line, all_lines: Sequence[Line]) -> float | None:
    """Returns median TTFT of the same cell without reuse over this one's; None if there is none."""
    for other in all_lines:
        if line.arm == "on" and other.arm == "off" and other.cell == line.cell:
            return other.ttft_ms.median / line.ttft_ms.median if line.ttft_ms.median else None
    return None


HEAD = (
    *("context", "turns", "at once", "reuse", "measured", "failed", "prompt tokens"),
    *("reused tokens", "read GB/s", "TTFT ms", "middle half", "times as fast", "latency ms"),
    "verdicts",
)


def cells_of(line: Line, all_lines: Sequence[Line]) -> tuple[str, ...]:
    """Returns a line as text, in the order of HEAD."""
    faster = ratio(line, all_lines)
    return (
        *(str(line.cell.context), str(line.cell.turns), str(line.cell.concurrency), line.arm),
        *(str(line.count), str(line.failed), f"{line.prompt_tokens:.0f}"),
        f"{line.reused_tokens:.0f}" if line.reused_tokens >= 0 else "",
        "" if line.read_gb_per_s is None else f"{line.read_gb_per_s:.2f}",
        f"{line.ttft_ms.median:.0f}",
        f"{line.ttft_ms.low:.0f} to {line.ttft_ms.high:.0f}",
        "" if faster is None else f"{faster:.2f}",
        f"{line.latency_ms.median:.0f}",
        line.verdicts,
    )


def markdown(all_lines: Sequence[Line]) -> str:
    """Returns the table as Markdown."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    rows += [cells_of(line, all_lines) for line in all_lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
