"""The tables, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.policy.experiment import Row, Scale

REFERENCE = "fixed 480 s"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table: the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def never_full_table(rows: list[Row]) -> str:
    """Returns reuse and cost of the policies in a memory that is never full."""
    reference = next(row for row in rows if row.name == REFERENCE)
    return table(
        ["policy", "reuse", "token-seconds held", f"of {REFERENCE}", "delayed"],
        [
            [
                row.name,
                _share(row.reuse[0]),
                f"{row.held[0] / 1e9:.2f} G",
                _share(row.held[0] / reference.held[0]),
                _share(row.delayed[0]),
            ]
            for row in rows
        ],
    )


def least_held_table(least: dict[str, float], reference_held: float) -> str:
    """Returns what the reuse of the reference needs at least."""
    return table(
        ["all clients heartbeat, linger 30 s; a policy with", f"of {REFERENCE}"],
        [[name, _share(held / reference_held)] for name, held in least.items()],
    )


def reuse_table(scale: Scale, bounds: dict[str, list[float]], rows: list[Row]) -> str:
    """Returns the reuse of bounds and policies in each memory."""
    lines = [[name, *map(_share, reuse)] for name, reuse in bounds.items()]
    lines += [[row.name, *map(_share, row.reuse)] for row in rows]
    return table(_memories("reuse", scale), lines)


def gap_table(scale: Scale, bounds: dict[str, list[float]], silent: Row) -> str:
    """Returns by how many points ours with silent clients stays below each bound for them."""
    lines = []
    for name, most in bounds.items():
        if "heartbeat" not in name:
            gaps = zip(most, silent.reuse, strict=True)
            lines.append([name, *(f"{100 * (each - reuse):.1f}" for each, reuse in gaps)])
    return table(_memories("points below", scale), lines)


def waiting_table(scale: Scale, rows: list[Row]) -> str:
    """Returns which share of the requests had to wait, and how."""
    lines = []
    for row in rows:
        pairs = zip(row.made_way, row.delayed, strict=True)
        lines.append([row.name, *(f"{_share(way)} / {_share(late)}" for way, late in pairs)])
    return table(_memories("round trip / longer", scale), lines)


def held_table(scale: Scale, rows: list[Row]) -> str:
    """Returns the token-seconds held in each memory."""
    lines = [[row.name, *(f"{held / 1e9:.2f} G" for held in row.held)] for row in rows]
    return table(_memories("token-seconds", scale), lines)


def _memories(what: str, scale: Scale) -> list[str]:
    return [what, *(f"{each / 1e6:g} M" for each in scale.memories_tokens)]


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
