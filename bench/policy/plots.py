"""Draws the figures of a run. Needs matplotlib, which has an environment of its own.

python bench/policy/plots.py FOLDER      (reads figures.json there, writes three PNG files)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]

mpl.use("Agg")
from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

REFERENCE = "fixed 480 s"
SILENT = "ours, silent clients"
JUDGED = "100% heartbeat, linger 30 s"


def draw_cost(figures: dict[str, Any], file: Path) -> None:
    """Reuse over token-seconds in a memory that is never full."""
    rows = figures["never_full"]
    reference = next(row for row in rows if row["name"] == REFERENCE)
    cost = {row["name"]: 100 * row["held"][0] / reference["held"][0] for row in rows}
    reuse = {row["name"]: 100 * row["reuse"][0] for row in rows}
    figure, axes = plt.subplots(figsize=(9, 5.5))
    fixed = [name for name in cost if name.startswith("fixed")]
    axes.plot([cost[each] for each in fixed], [reuse[each] for each in fixed], "o-", label="fixed")
    for name in fixed:
        place = (cost[name], reuse[name])
        axes.annotate(name, place, (6, -12), textcoords="offset points", fontsize=7)
    silent = "idle 60 s, silent clients"
    for linger in ("0 s", "30 s", "120 s"):
        names = [silent]
        names += [f"idle, {share}% heartbeat, linger {linger}" for share in (25, 50, 100)]
        names = [name for name in names if name in cost]
        axes.plot(
            [cost[name] for name in names],
            [reuse[name] for name in names],
            "D-",
            markersize=5,
            label=f"idle; 0, 25, 50, 100 % heartbeat, linger {linger}",
        )
    curves = figures["frontiers"]
    for name, style in zip(curves, ("k-", "k--", "k:"), strict=True):
        points = curves[name]
        axes.plot(
            [100 * held / reference["held"][0] for held, _ in points],
            [100 * reuse for _, reuse in points],
            style,
            linewidth=1,
            label=f"bound: {name}",
        )
    axes.axhline(100 * reference["reuse"][0], color="grey", linewidth=0.6)
    axes.axvline(20, color="grey", linewidth=0.6)
    axes.set(
        xlim=(0, 105),
        ylim=(0, 102),
        xlabel=f"token-seconds held, % of {REFERENCE}",
        ylabel="reusable tokens reused, %",
        title="Memory that is never full (bounds: all clients heartbeat, linger 30 s)",
    )
    axes.legend(fontsize=8, loc="lower right")
    _save(figure, file)


def draw_pressure(figures: dict[str, Any], file: Path) -> None:
    """Reuse over the size of the memory."""
    figure, axes = plt.subplots(figsize=(11, 5.5))
    memories = [each / 1e6 for each in figures["memories_tokens"]]
    for (name, reuse), style in zip(
        figures["bounds"].items(), ("k-", "k-.", "k--", "k:", "b:"), strict=True
    ):
        axes.plot(memories, [100 * each for each in reuse], style, linewidth=1, label=name)
    shown = [
        f"ours, {JUDGED}",
        f"ours, {JUDGED.replace('100%', '50%')}",
        SILENT,
        "oldest first (LRU)",
        "fixed 60 s",
        REFERENCE,
    ]
    rows = {row["name"]: row for row in figures["limited"]}
    for name in shown:
        if name in rows:
            reuse = [100 * each for each in rows[name]["reuse"]]
            axes.plot(memories, reuse, "o-", markersize=4, label=name)
    axes.set(
        xscale="log",
        ylim=(0, 102),
        xlabel="KV memory of decode, million tokens",
        ylabel="reusable tokens reused, %",
        title="Memory that is short",
    )
    axes.set_xticks(memories, [f"{each:g}" for each in memories])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, file)


def draw_waiting(figures: dict[str, Any], file: Path) -> None:
    """Requests that waited, over the size of the memory."""
    figure, axes = plt.subplots(figsize=(9, 4))
    memories = [each / 1e6 for each in figures["memories_tokens"]]
    for row in figures["limited"]:
        if row["name"] in (REFERENCE, "fixed 60 s", "oldest first (LRU)", SILENT):
            axes.plot(
                memories,
                [100 * each for each in row["delayed"]],
                "o-",
                label=f"{row['name']}: waits for a hold to end",
            )
        if row["name"] == SILENT:
            made_way = [100 * each for each in row["made_way"]]
            axes.plot(memories, made_way, "s--", label=f"{SILENT}: waits for one round trip")
    axes.set(
        xscale="log",
        ylim=(-2, 102),
        xlabel="KV memory of decode, million tokens",
        ylabel="requests that waited, %",
        title="Requests whose memory could not be had at once",
    )
    axes.set_xticks(memories, [f"{each:g}" for each in memories])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(folder: Path) -> None:
    """Draws all of them."""
    figures = json.loads((folder / "figures.json").read_text())
    draw_cost(figures, folder / "never_full.png")
    draw_pressure(figures, folder / "pressure.png")
    draw_waiting(figures, folder / "waiting.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
