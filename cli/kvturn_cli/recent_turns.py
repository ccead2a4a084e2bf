"""The turns that were seen lately, each once, and what came of them. No I/O."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from kvturn.v1 import lease_pb2
from kvturn_cli.fields import Fields, turn_fields

SEEN_MAX = 500
"""Turns that are kept; the first seen are forgotten first."""


class Reuse(NamedTuple):
    """What came of some turns. Tokens are those of turns whose prompt's size is known."""

    turns: int
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    ttft_ms: float | None
    """Median; None if none is known."""
    saved_ms: float
    verdicts: list[tuple[str, int]]
    """How often each was given, the most frequent first."""


class RecentTurns:
    """Turns by conversation and number."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, str, str, int], Fields] = OrderedDict()

    def see(self, conversations: Iterable[lease_pb2.Conversation]) -> None:
        """Takes the latest turn of each; what was seen before counts once."""
        with_turn = [each for each in conversations if each.HasField("latest_turn")]
        with_turn.sort(key=lambda each: -each.latest_turn.age.ToMicroseconds())
        for each in with_turn:
            key = each.key
            turn = (key.tenant, key.model, key.conversation_id, each.latest_turn.turn)
            if turn not in self._turns:
                self._turns[turn] = turn_fields(each.latest_turn)
                if len(self._turns) > SEEN_MAX:
                    self._turns.popitem(last=False)

    def reuse(self) -> Reuse:
        """Returns what came of all that are kept."""
        turns = list(self._turns.values())
        sized = [turn for turn in turns if turn["prompt_tokens"] is not None]
        first_bytes = [turn["first_byte_ms"] for turn in turns if turn["first_byte_ms"] is not None]
        return Reuse(
            turns=len(turns),
            prompt_tokens=sum(turn["prompt_tokens"] for turn in sized),
            reused_tokens=sum(turn["reused_tokens"] for turn in sized),
            local_tokens=sum(turn["local_tokens"] for turn in sized),
            ttft_ms=median(first_bytes) if first_bytes else None,
            saved_ms=sum(turn["saved_ms"] or 0.0 for turn in turns),
            verdicts=Counter(turn["verdict"] for turn in turns).most_common(),
        )
