"""Routers' sessions in random worlds: what is counted in flight is what routers have in flight."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.router_mutants import MUTANTS
from sim.router_world import run_router_seed

SEEDS = 60
MUTANT_SEEDS = 40
COVERAGE = (
    "turns",
    "turns taken over",
    "crashes",
    "breaks",
    "failovers",
    "idle",
    "in flight when healed",
)


def test_turns_are_counted_exactly_while_a_living_router_has_them() -> None:
    """Routers crash, are cut off and come back, the lease service fails over; all meet again.

    In flight is exactly what a session was told of and not told the end of, nothing in flight is
    given up as idle, numbers are unique and rise, each answer and each grant comes once, and a
    session that follows another has all of its turns.
    """
    count: Counter[str] = Counter()
    for seed in range(SEEDS):
        failure, seen = run_router_seed(seed)
        assert not failure, failure
        count += seen
    assert all(count[name] for name in COVERAGE), count


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_caught(name: str) -> None:
    """The simulation would find the absence of each of these rules."""
    assert any(run_router_seed(seed, MUTANTS[name])[0] for seed in range(MUTANT_SEEDS))


def test_a_seed_is_the_same_world_each_time() -> None:
    """So that one that failed can be looked at again."""
    assert run_router_seed(7) == run_router_seed(7)
