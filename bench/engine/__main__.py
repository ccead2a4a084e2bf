"""Measures what retentions cost a decode engine, prints tables and writes them to a file.

    python -m bench.engine [--only idle,pressure] [--vllm VERSION] [--out FILE]

Takes about ten minutes. Needs what `make setup` prepares.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from bench.engine.idle import measure_idle
from bench.engine.pressure import measure_pressure
from bench.lease.machine import facts, load_average

RESULTS = Path(__file__).with_name("RESULTS.md")
SECTIONS = {"idle": measure_idle, "pressure": measure_pressure}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--vllm", default="0.32.0", help="vLLM version (default 0.32.0)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the tables")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: sections are {', '.join(SECTIONS)}")
    tables = [SECTIONS[name](args.vllm) for name in names]
    how = (
        f"`python -m bench.engine --only {args.only} --vllm {args.vllm}`, "
        f"{datetime.date.today()}, on {facts()}; load averages at the end {load_average()}."
    )
    shown = (table.markdown() for table in tables)
    text = "\n".join(["# What retentions cost a decode engine", "", how, "", *shown])
    args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
