"""The demo's result: one row per turn, its table, its file, its summary. Pure."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvturn_cli.script import Kind
from kvturn_cli.turn import TurnResult

REUSED_VERDICTS = frozenset({"reused", "partial_prefix"})


@dataclass(frozen=True)
class Row:
    """One turn with reuse, and the same turn without."""

    turn: int
    """Number in the conversation, from 1."""
    kind: Kind
    """What the turn did with the history."""
    conversation_id: str
    """The conversation."""
    prompt_tokens: int
    """Tokens of the prompt."""
    reused_tokens: int
    """Tokens whose KV was read instead of computed."""
    verdict: str
    """Why, or why not."""
    ttft_ms: float
    """Time to the first piece of the reply."""
    prefill_ms: float
    """Duration of the prefill leg."""
    read_ms: float
    """Duration of the KV read."""
    read_bytes: int
    """Bytes read."""
    baseline_ttft_ms: float
    """Time to the first piece of the same turn with reuse turned off."""

    def is_missed(self) -> bool:
        """Tells whether the turn had to reuse KV and did not: a growing turn after the first."""
        reused = self.reused_tokens > 0 and self.verdict in REUSED_VERDICTS
        return self.kind == "growing" and self.turn > 1 and not reused


def make_row(turn: int, kind: Kind, result: TurnResult, baseline: TurnResult) -> Row:
    """Puts a turn and its baseline together.

    Raises ValueError if the baseline is none: another prompt, or one that reused KV.
    """
    if baseline.prompt_tokens != result.prompt_tokens:
        raise ValueError(
            f"turn {turn}: the baseline's prompt has {baseline.prompt_tokens} tokens,"
            f" the turn's {result.prompt_tokens}"
        )
    if baseline.reused_tokens:
        raise ValueError(f"turn {turn}: the baseline reused {baseline.reused_tokens} tokens")
    return Row(
        turn=turn,
        kind=kind,
        conversation_id=result.conversation_id,
        prompt_tokens=result.prompt_tokens,
        reused_tokens=result.reused_tokens,
        verdict=result.verdict,
        ttft_ms=round(result.ttft_ms, 1),
        prefill_ms=round(result.prefill_ms, 1),
        read_ms=round(result.read_ms, 2),
        read_bytes=result.read_bytes,
        baseline_ttft_ms=round(baseline.ttft_ms, 1),
    )


def to_json(rows: Sequence[Row]) -> str:
    """Returns the rows as a JSON array of objects, one field per field of Row."""
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


HEADER = (
    f"{'turn':>4} {'kind':<10} {'prompt':>6} {'reused':>6}  {'verdict':<25} {'TTFT':>6}"
    f" {'baseline':>8} {'ratio':>6} {'prefill':>7} {'read':>7} {'read':>7}"
)
UNITS = (
    f"{'':>4} {'':<10} {'tokens':>6} {'tokens':>6}  {'':<25} {'ms':>6}"
    f" {'ms':>8} {'':>6} {'ms':>7} {'ms':>7} {'MB':>7}"
)


def table_line(row: Row) -> str:
    """Returns a row as a line under HEADER and UNITS."""
    ratio = row.baseline_ttft_ms / row.ttft_ms if row.ttft_ms else 0.0
    return (
        f"{row.turn:>4} {row.kind:<10} {row.prompt_tokens:>6} {row.reused_tokens:>6}"
        f"  {row.verdict:<25} {row.ttft_ms:>6.0f} {row.baseline_ttft_ms:>8.0f} {ratio:>5.1f}x"
        f" {row.prefill_ms:>7.0f} {row.read_ms:>7.1f} {row.read_bytes / 1e6:>7.1f}"
    )


def summary(rows: Sequence[Row]) -> str:
    """Returns one sentence that compares the growing turns that could reuse with the baseline."""
    compared = [row for row in rows if row.kind == "growing" and row.turn > 1]
    if not compared:
        return "No growing turn after the first: nothing to compare."
    ttft_ms = statistics.median(row.ttft_ms for row in compared)
    baseline_ms = statistics.median(row.baseline_ttft_ms for row in compared)
    return (
        f"Median TTFT of the {len(compared)} growing turns after the first: {ttft_ms:.0f} ms with"
        f" reuse, {baseline_ms:.0f} ms without; {baseline_ms / ttft_ms:.1f} times as fast."
    )
