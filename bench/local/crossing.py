"""What each way costs, cell by cell: a history, a suffix, and how busy decode is."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.local.legs import Chat, Message, text
from kvturn_router.choice.plan import PlanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvturn_cli.stack import Stack

WAYS = (PlanKind.LOCAL, PlanKind.PULL, PlanKind.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One history and one suffix, in tokens as asked for; the real numbers are a little higher."""

    history: int
    suffix: int


@dataclass
class Measured:
    """One cell's turns."""

    held_tokens: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    ms: dict[PlanKind, list[float]] = field(default_factory=dict)

    def median(self, way: PlanKind) -> float:
        """Median time to the first token."""
        return statistics.median(self.ms[way])

    def halves(self, way: PlanKind) -> tuple[float, float]:
        """Medians of every other turn, and of the rest; the same if there is one turn only."""
        ms = self.ms[way]
        return statistics.median(ms[::2]), statistics.median(ms[1::2] or ms)

    def scatter(self, way: PlanKind) -> float:
        """How far half of the turns lie from the median, as a share of it."""
        median = self.median(way)
        return statistics.median(abs(ms - median) for ms in self.ms[way]) / median


def measure(stack: Stack, cells: Sequence[Cell], rounds: int) -> dict[Cell, Measured]:
    """Serves every cell every way, in an order that is shuffled anew each round.

    Recompute, which takes long and comes close to none, in every third round only. Each history
    is one conversation; its turns part after the history, so that each of them finds the same
    prefix held.
    """
    rng = random.Random(5)
    chats = {history: _begun(stack, history) for history in {cell.history for cell in cells}}
    found = {cell: Measured() for cell in cells}
    for number in range(rounds):
        ways = WAYS if number % 3 == 0 else WAYS[:2]
        todo = [(cell, way) for cell in cells for way in ways]
        rng.shuffle(todo)
        for cell, way in todo:
            chat, messages = chats[cell.history]
            said = text(f"q{number}{way}{cell.suffix}", cell.suffix)
            turn = [*messages, {"role": "user", "content": said}]
            held = chat.held()
            served = chat.serve(way, turn, held.lease_id)
            cell_found = found[cell]
            cell_found.ms.setdefault(way, []).append(served.first_token_ms)
            cell_found.new_bytes = new_bytes(turn)
            if way is PlanKind.PULL:
                cell_found.held_tokens = served.took.reused_tokens
                cell_found.new_tokens = served.took.prompt_tokens - served.took.reused_tokens
    return found


def new_bytes(messages: list[Message]) -> int:
    """Bytes of the last message as JSON, which are what is new in a turn."""
    return len('{"role":"user","content":""}') + len(messages[-1]["content"].encode())


def _begun(stack: Stack, history: int) -> tuple[Chat, list[Message]]:
    chat = Chat(stack, f"history-{history}")
    messages = [{"role": "user", "content": text(f"document {history}", history)}]
    served = chat.serve(PlanKind.RECOMPUTE, messages)
    messages.append({"role": "assistant", "content": served.reply})
    return chat, messages
