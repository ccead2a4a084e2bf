"""What is measured: cells, arms, and one row a turn. No I/O."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ARMS = ("on", "off")
"""on: turns may reuse KV; off: turns ask for no reuse (X-Kvturn-Reuse: off)."""


@dataclass(frozen=True, order=True)
class Cell:
    """One combination of what is varied."""

    context: int
    """Wanted length of the first prompt, in tokens."""
    turns: int
    """Turns of each conversation."""
    concurrency: int
    """Conversations held at once."""


@dataclass(frozen=True)
class Run:
    """One cell measured once in one arm."""

    cell: Cell
    arm: str
    repeat: int

    def conversation(self, label: str, number: int) -> str:
        """Returns the id of its conversation of that number, unlike that of any other run."""
        cell = self.cell
        name = f"{cell.context}-{cell.turns}-{cell.concurrency}-{self.arm}-{self.repeat}-{number}"
        return f"sweep-{label}-{name}"


@dataclass(frozen=True)
class Row:
    """One turn."""

    context: int
    turns: int
    concurrency: int
    arm: str
    repeat: int
    conversation: str
    turn: int
    """Number in the conversation, from 1."""
    prompt_tokens: int
    reused_tokens: int
    """Tokens whose KV prefill read from decode; -1 where the driver is not told."""
    local_tokens: int
    """Tokens from the engine's own prefix cache; -1 as above."""
    verdict: str
    """Why KV was reused or not; empty as above."""
    read_bytes: int
    """Bytes of KV read from decode; -1 as above."""
    read_ms: float
    """How long the read took; -1 as above."""
    ttft_ms: float
    """Time to the first piece of the answer."""
    latency_ms: float
    """Time to the end of the answer."""
    error: str
    """Why the turn failed; empty if it did not."""

    @property
    def cell(self) -> Cell:
        """The cell that the turn belongs to."""
        return Cell(self.context, self.turns, self.concurrency)


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def row_of(record: Mapping[str, str]) -> Row:
    """Returns the row that a record of rows.csv holds. Raises ValueError or KeyError."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Row)}
    convert = {"int": int, "float": float, "str": str}
    return Row(**{name: convert[kind](record[name]) for name, kind in kinds.items()})


def cells(contexts: Iterable[int], turns: Iterable[int], concurrency: Iterable[int]) -> list[Cell]:
    """Returns all combinations."""
    return [Cell(*values) for values in itertools.product(contexts, turns, concurrency)]


def runs(wanted: Sequence[Cell], arms: Sequence[str], repeats: int) -> Iterator[Run]:
    """Yields the runs in order: arms take turns in being first, so that none gains by its place."""
    for repeat in range(repeats):
        for cell in wanted:
            for arm in arms if repeat % 2 == 0 else tuple(reversed(arms)):
                yield Run(cell, arm, repeat)
