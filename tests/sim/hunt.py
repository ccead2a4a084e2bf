"""Hunts mutants: by random seeds and by directed scenarios."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.mutants import MUTANTS, Mutant
from sim.scenarios import SCENARIOS
from sim.simulation import Outcome, run_seed
from sim.world import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True)
class Trophy:
    """Where a mutant was caught."""

    mutant: Mutant
    outcome: Outcome | None
    """Of the first seed that catches it; None if none did."""
    scenarios: tuple[str, ...]
    """The directed scenarios that catch it."""


_SEEDS_BESIDE_SCENARIO = 300
"""A mutant that a scenario catches is hunted in so many seeds only."""


def hunt(seeds: int) -> Iterator[Trophy]:
    """Hunts every mutant in all scenarios, and in seeds from 0 on."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        tasks = [(index, range(seeds)) for index in range(len(MUTANTS))]
        yield from pool.imap(_hunt_one, tasks)


def _hunt_one(task: tuple[int, Sequence[int]]) -> Trophy:
    index, seeds = task
    mutant = MUTANTS[index]
    scenarios = tuple(scenarios_that_catch(mutant))
    if scenarios:
        seeds = seeds[:_SEEDS_BESIDE_SCENARIO]
    return Trophy(mutant, first_caught(mutant, seeds), scenarios)


def first_caught(mutant: Mutant, seeds: Iterable[int]) -> Outcome | None:
    """Returns how the first of the seeds went that catches the mutant."""
    outcomes = (run_seed(seed, mutant.cores) for seed in seeds)
    return next((outcome for outcome in outcomes if outcome.failure), None)


def scenarios_that_catch(mutant: Mutant) -> Iterator[str]:
    """Names the directed scenarios in which the mutant breaks a promise."""
    for scenario in SCENARIOS:
        try:
            scenario(mutant.cores)
        except Violation:
            yield scenario.__name__
