"""What was found, and what is worth trying each time: bytes in files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parent / "corpus"


def corpus(kind: str) -> dict[str, bytes]:
    """Returns what is kept of a kind, "bodies" or "streams", by name."""
    return {path.stem: path.read_bytes() for path in sorted((_ROOT / kind).iterdir())}
