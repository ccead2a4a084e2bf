"""Prompts of a wanted length, each unlike every other from its first word on. No I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass

_FIRST = "amber basalt cedar coral ebony flint ivory jade onyx pearl quartz ruby sand slate zinc"
_SECOND = "arch barn bell cape dune fjord gate harbour isle lake mill pier quay ridge tower vale"
_WORDS = [f"{first} {second}" for first in _FIRST.split() for second in _SECOND.split()]


@dataclass(frozen=True)
class Length:
    """How a model's tokens follow from pairs of words: so many for each, and a fixed part."""

    tokens_per_word: float
    fixed_tokens: float

    @classmethod
    def of(cls, shorter: tuple[int, int], longer: tuple[int, int]) -> Length:
        """Learns it from two prompts, each as (words, tokens).

        Raises ValueError if they tell nothing.
        """
        words, tokens = longer[0] - shorter[0], longer[1] - shorter[1]
        if words <= 0 or tokens <= 0:
            raise ValueError(f"prompts of {shorter} and {longer} words and tokens tell no length")
        per_word = tokens / words
        return cls(per_word, shorter[1] - per_word * shorter[0])

    def words(self, tokens: int) -> int:
        """Returns how many pairs of words make a first prompt of so many tokens, at least 1."""
        return max(1, round((tokens - self.fixed_tokens) / self.tokens_per_word))

    def more_words(self, tokens: int) -> int:
        """Returns how many pairs of words add so many tokens to a conversation, at least 1."""
        return max(1, round(tokens / self.tokens_per_word))


def text(seed: str, words: int) -> str:
    """Returns so many pairs of words: the same for a seed, unlike those of any other seed."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))
