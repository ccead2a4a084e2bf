"""How far two right answers of an engine may lie apart: what rounding makes of other batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conversation import Conversation, distance
from prose import document

from kvturn_cli.engine import data_type

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

PAIRS = 8 if data_type() == "bfloat16" else 2
"""In float32 there is next to no noise: less than 0.0005 in each of eight pairs."""
MARGIN = 1.25
"""The largest of a few draws understates the largest of many."""
LEAST = 0.01
"""Bound where rounding makes less; wrong KV is a thousand times as far away."""


def measured_noise(stack: Stack) -> float:
    """How far cold runs of one prompt lie apart when only the batches differ.

    The second run of a pair finds most of its history in its own prefix cache, where that very
    engine computed the prompt in one batch and the reply token by token: the same steps as with
    decode's KV, but no KV ever crossed to another engine.
    """
    distances = []
    for index in range(PAIRS):
        chat = Conversation(stack, "")
        question = {"role": "user", "content": document(f"noise {index}", 150) + "\nSay more."}
        reply = chat.generate_alone([question], prefill=1, max_tokens=80)
        whole = [
            question,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "What is the capital of France?"},
        ]
        cached = chat.prefill(whole, prefill=1)
        assert cached.report["local_tokens"] > 0
        assert cached.reused_tokens == 0
        distances.append(distance(cached.logprobs, chat.cold(whole)))
    print(f"noise, cold against cold: {[round(one, 3) for one in distances]}")
    return max(MARGIN * max(distances), LEAST)
