"""Real prose for prompts: the licence, from another paragraph on in every conversation."""

from __future__ import annotations

from pathlib import Path

_PARAGRAPHS = [
    " ".join(paragraph.split())
    for paragraph in (Path(__file__).parents[2] / "LICENSE").read_text().split("\n\n")
    if len(paragraph) > 200
]
_CHARACTERS_A_TOKEN = 6
"""More than in any paragraph."""


def document(name: str, tokens: int = 180) -> str:
    """At least `tokens` tokens, 20 % more as a rule; half a second of prefill on a slow machine.

    `name` comes first, so that no two documents share a prefix.
    """
    start = sum(name.encode()) % len(_PARAGRAPHS)
    text = "\n".join(_PARAGRAPHS[start:] + _PARAGRAPHS[:start])
    return f"Document {name}.\n" + text[: tokens * _CHARACTERS_A_TOKEN]
