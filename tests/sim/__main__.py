"""`make sim`: many seeds of the real cores, then each mutant until it is caught; then the same
for routers' sessions.

`make sim SEED=n` replays one seed with its event log.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from sim.hunt import hunt
from sim.router_mutants import MUTANTS as ROUTER_MUTANTS
from sim.router_world import run_router_seed
from sim.seeds import COVERAGE, run_seeds
from sim.simulation import run_seed


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print its event log")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many seeds to run")
    parser.add_argument("--mutant-seeds", type=int, default=2_000, help="seeds for each mutant")
    parser.add_argument("--router-seeds", type=int, default=2_000, help="of routers' sessions")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _replay(arguments.seed)
    healthy = _run_many(arguments.seeds)
    caught = _hunt_mutants(arguments.mutant_seeds)
    counted = _run_routers(arguments.router_seeds)
    return 0 if healthy and caught and counted else 1


def _run_routers(seeds: int) -> bool:
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        failures = [each for each, _ in pool.imap(run_router_seed, range(seeds), 20) if each]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"\n{seeds - len(failures)} of {seeds} seeds keep routers' sessions")
    survivors = [
        name
        for name, cores in ROUTER_MUTANTS.items()
        if not any(run_router_seed(seed, cores)[0] for seed in range(seeds))
    ]
    for name in survivors:
        print(f"survives: {name}", file=sys.stderr)
    print(f"{len(ROUTER_MUTANTS) - len(survivors)} of {len(ROUTER_MUTANTS)} mutants are caught")
    return not failures and not survivors


def _replay(seed: int) -> int:
    outcome = run_seed(seed, traced=True)
    print("\n".join(outcome.log or ()))
    print(outcome if outcome.failure else f"seed {seed} keeps all promises\n  {outcome.weather}")
    return 1 if outcome.failure else 0


def _run_many(seeds: int) -> bool:
    count, failures = run_seeds(range(seeds), on_progress=_show)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{seeds - len(failures)} of {seeds} seeds keep all promises")
    for name in sorted(count):
        print(f"  {count[name]:>9} {name}")
    missing = [name for name in COVERAGE if not count[name]]
    if missing:
        print(f"never seen: {', '.join(missing)}", file=sys.stderr)
    return not failures and not missing


def _hunt_mutants(seeds: int) -> bool:
    survivors = []
    print(f"\n{'mutant':46} {'rule':>8} {'seed':>5}  {'broke':7}  scenarios that catch it")
    for trophy in hunt(seeds):
        mutant, caught = trophy.mutant, trophy.outcome
        seed, broke = ("-", "-") if caught is None else (str(caught.seed), caught.promise)
        scenarios = ", ".join(trophy.scenarios) or "-"
        print(f"{mutant.name:46} {mutant.rule:>8} {seed:>5}  {broke:7}  {scenarios}", flush=True)
        if caught is None and not trophy.scenarios:
            survivors.append(mutant.name)
    for name in survivors:
        print(f"survives: {name}", file=sys.stderr)
    return not survivors


def _show(done: int, total: int, failed: int) -> None:
    end = "\n" if done == total else "\r"
    print(f"{done} of {total} seeds, {failed} failed", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
