"""Random worlds of the real cores keep every promise, and are the same each time."""

from __future__ import annotations

from sim.seeds import COVERAGE, run_seeds
from sim.simulation import run_seed

SEEDS = 2_000


def test_every_seed_keeps_every_promise() -> None:
    """Loss, delay, partitions, drift, pauses, crashes and failovers break none of S1 to L3.

    The batch counts only if it has seen what it is there for.
    """
    count, failures = run_seeds(range(SEEDS))
    shown = ", ".join(f"{count[name]} {name}" for name in COVERAGE)
    print(f"{SEEDS} seeds: {shown}")
    assert not failures, "\n".join(str(failure) for failure in failures)
    assert all(count[name] for name in COVERAGE), shown


def test_the_same_seed_twice_gives_the_same_event_log() -> None:
    """A seed that failed can be looked at again."""
    first, again = run_seed(7, traced=True), run_seed(7, traced=True)
    assert first.log
    assert first.log == again.log


def test_a_failing_seed_tells_how_to_see_it_again() -> None:
    """Seed, virtual time, lease id and the command."""
    from sim.mutants import MUTANTS

    mutant = next(each for each in MUTANTS if each.name == "double grant")
    outcome = next(
        each for each in (run_seed(seed, mutant.cores) for seed in range(50)) if each.failure
    )
    text = str(outcome)
    assert f"seed {outcome.seed}: at " in text
    assert "S3: granted again" in text
    assert "[lease d" in text
    assert f"make sim SEED={outcome.seed}" in text
