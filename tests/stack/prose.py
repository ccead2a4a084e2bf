"""Real prose for prompts: numbered paragraphs of the licence, different in every conversation."""

from __future__ import annotations

from pathlib import Path

_PARAGRAPHS = [
    " ".join(paragraph.split())
    for paragraph in (Path(__file__).parents[2] / "LICENSE").read_text().split("\n\n")
    if len(paragraph) > 200
]


def document(name: str, paragraphs: int = 4) -> str:
    """About 150 tokens a paragraph. `name` comes first, so that no two documents share a prefix."""
    start = sum(name.encode()) % len(_PARAGRAPHS)
    chosen = (_PARAGRAPHS[(start + i) % len(_PARAGRAPHS)] for i in range(paragraphs))
    return f"Document {name}.\n" + "\n".join(chosen)
