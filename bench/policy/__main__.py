"""Replays a trace of real requests under several policies and writes tables.

    python -m bench.policy --out FOLDER [--trace FILE] [--fast] [--jobs N]

Writes RESULTS.md and figures.json, of which plots.py makes pictures.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.policy import report
from bench.policy.experiment import FAST, FULL, Scale, bounds, frontiers, least_held, run
from bench.policy.trace import Trace, TraceError, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_TRACE = Path("build") / "mooncake_conversation_trace.jsonl"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; 2 for a trace that is not there."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy", allow_abbrev=False)
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path(os.environ.get("KVTURN_TRACE", DEFAULT_TRACE)),
        help=f"the trace (variable KVTURN_TRACE, default {DEFAULT_TRACE})",
    )
    parser.add_argument("--fast", action="store_true", help="a slice of the trace, few policies")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes to use")
    args = parser.parse_args(argv)
    scale = FAST if args.fast else FULL
    try:
        trace = read_trace(args.trace, scale.requests_max)
    except TraceError as error:
        print(
            f"bench-policy: {error}; bench/policy/README.md says where it comes from, name it with"
            " --trace or KVTURN_TRACE",
            file=sys.stderr,
        )
        return 2
    figures, text = measure(trace, scale, args.jobs)
    command = "make bench-policy" + (" BENCH_ARGS=--fast" if args.fast else "")
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "RESULTS.md"
    results.write_text(_head(trace, command) + text)
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text)
    return 0


def measure(trace: Trace, scale: Scale, jobs: int) -> tuple[dict[str, object], str]:
    """Returns all figures, for the plots, and the tables."""

    def progress(line: str) -> None:
        print(f"bench-policy: {line}", file=sys.stderr, flush=True)

    unlimited, limited = run(trace, scale, jobs, progress)
    possible = bounds(trace, scale)
    reference = next(row for row in unlimited if row.name == report.REFERENCE)
    least = least_held(trace, reference.reuse[0] * trace.reusable_tokens)
    silent = next(row for row in limited if row.name == "ours, silent clients")
    sections = {
        "A memory that is never full": report.never_full_table(unlimited),
        "The least that this reuse needs": report.least_held_table(least, reference.held[0]),
        "Reuse by memory, in tokens": report.reuse_table(scale, possible, limited),
        "Ours with silent clients, below the bounds": report.gap_table(scale, possible, silent),
        "Requests that waited": report.waiting_table(scale, limited),
        "Token-seconds held": report.held_table(scale, limited),
    }
    figures: dict[str, object] = {
        "memories_tokens": scale.memories_tokens,
        "never_full": [asdict(row) for row in unlimited],
        "limited": [asdict(row) for row in limited],
        "bounds": possible,
        "least_held": least,
        "frontiers": frontiers(trace),
    }
    return figures, "\n".join(f"## {title}\n\n{body}\n" for title, body in sections.items())


def _head(trace: Trace, command: str) -> str:
    turns = sum(request.parent is not None for request in trace.requests)
    return (
        "# Policies on real traffic\n\n"
        f"Written by `{command}` on {datetime.date.today()}. What the rows and figures mean:"
        " [README.md](README.md).\n\n"
        f"Trace: SHA-256 {trace.digest}; {len(trace.requests):,} requests in"
        f" {trace.end_ns / 1e9:,.0f} s, of which {turns:,} continue an earlier one;"
        f" {trace.reusable_tokens:,} reusable tokens.\n\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
