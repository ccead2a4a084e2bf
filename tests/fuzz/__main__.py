"""`make fuzz MINUTES=n`: as much CPU time as that for bodies, streams and calls of every sort.

What fails is shrunk, told, and written to build/fuzz/; once mended it belongs
into tests/fuzz/corpus/, where every `make test` tries it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor

from fuzz.hunt import hunt


def main() -> int:
    """Runs the jobs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="CPU time over all jobs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.jobs} jobs", flush=True)
    cpu_s = asked.minutes * 60 / asked.jobs
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        seeds = range(asked.seed, asked.seed + asked.jobs)
        hunts = list(pool.map(hunt, seeds, [cpu_s] * asked.jobs))
    faults = sorted({fault for done in hunts for fault in done.faults})
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{sum(done.tried for done in hunts)} tried, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
