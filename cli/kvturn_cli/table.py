"""Tables that fit the terminal: names are cut and columns left out where it is narrow.

Names come from clients. What is not printable in them is shown as an escape, so that none can
move the cursor, change the title or hide what follows; characters that take two cells count as two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")

CUT = "…"
"""Stands for what was cut."""
GAP = 2
"""Blank cells between columns."""


def printable(text: str) -> str:
    """Returns a text in which everything can be seen and nothing acts on the terminal."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column."""

    title: str
    cell: Callable[[Row], str | Text]
    """What it shows of a row; a Text is shown as it is."""
    right: bool = field(default=False, kw_only=True)
    """For numbers."""
    cut_to: int = field(default=0, kw_only=True)
    """Width in cells that it may be cut to; 0: it is whole or not there."""
    keeps_end: bool = field(default=False, kw_only=True)
    """Where it is cut, its beginning goes: that is what names of a kind have in common."""
    leaves: int = field(default=0, kw_only=True)
    """Of columns that may be left out the one with the highest number is first; 0: never."""
    style: Callable[[Row], str] | None = field(default=None, kw_only=True)


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int | None) -> Table:
    """Returns a table that is at most `width` cells wide if that can be; None: as wide as it is."""
    cells = [[_cell(column, row) for row in rows] for column in columns]
    widths = [
        max(cell_len(column.title), *(cell.cell_len for cell in its_cells), 0)
        for column, its_cells in zip(columns, cells, strict=True)
    ]
    kept = list(range(len(columns)))
    if width is not None:
        kept = _kept(columns, widths, width)
        _cut(columns, widths, kept, width)
    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for index in kept:
        column = columns[index]
        shown.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=widths[index],
        )
    for number in range(len(rows)):
        shown.add_row(
            *(
                _end(cells[index][number], widths[index])
                if columns[index].keeps_end
                else cells[index][number]
                for index in kept
            )
        )
    return shown


def _end(cell: Text, width: int) -> Text:
    if cell.cell_len <= width:
        return cell
    text = cell.plain
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return Text(f"{CUT}{text}", style=cell.style)


def _cell(column: Column[Row], row: Row) -> Text:
    shown = column.cell(row)
    if isinstance(shown, Text):
        return shown
    return Text(printable(shown), style="" if column.style is None else column.style(row))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _kept(columns: Sequence[Column[Any]], widths: Sequence[int], width: int) -> list[int]:
    """Returns the columns that stay, once those that may be cut are as narrow as they may be."""
    least = [
        min(found, column.cut_to) if column.cut_to else found
        for column, found in zip(columns, widths, strict=True)
    ]
    kept = list(range(len(columns)))
    while _total([least[index] for index in kept]) > width:
        leaving = max(kept, key=lambda index: columns[index].leaves)
        if not columns[leaving].leaves:
            break
        kept.remove(leaving)
    return kept


def _cut(
    columns: Sequence[Column[Any]], widths: list[int], kept: Sequence[int], width: int
) -> None:
    """Cuts the columns that may be cut, the widest first, until all fit."""
    while (excess := _total([widths[index] for index in kept]) - width) > 0:
        wide = [index for index in kept if 0 < columns[index].cut_to < widths[index]]
        if not wide:
            return
        widest = max(wide, key=lambda index: widths[index])
        narrower = max([widths[index] for index in wide if widths[index] < widths[widest]] or [0])
        least = max(columns[widest].cut_to, narrower)
        widths[widest] = max(least, widths[widest] - excess)
