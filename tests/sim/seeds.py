"""Many seeds on all processors."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from typing import TYPE_CHECKING

from sim.simulation import Outcome, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COVERAGE = (
    "reads granted",
    "reads used",
    "calm reuses",
    "expiries under a read",
    "failovers",
    "pressure frees",
    "calm pressure",
    "fencings",
    "late reads",
    "late reads of freed blocks",
    "inherited waits",
    "split leaders",
)
"""What a batch of seeds must have seen, each at least once."""
_CHUNK = 20


def run_seeds(
    seeds: Sequence[int], on_progress: Callable[[int, int, int], None] | None = None
) -> tuple[Counter[str], list[Outcome]]:
    """Runs the seeds; returns what was counted in all of them, and those that failed.

    `on_progress` is called with the numbers of seeds done, in all, and failed.
    """
    count: Counter[str] = Counter()
    failures: list[Outcome] = []
    # "spawn": a fork of a test process would inherit its threads' locks.
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        outcomes = pool.imap(run_seed, seeds, chunksize=_CHUNK)
        for done, outcome in enumerate(outcomes, start=1):
            count += outcome.count
            if outcome.failure:
                failures.append(outcome)
            if on_progress is not None and (done % _CHUNK == 0 or done == len(seeds)):
                on_progress(done, len(seeds), len(failures))
    return count, failures
