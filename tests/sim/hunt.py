"""Hunts mutants: by random seeds and by directed scenarios."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.mutants import MUTANTS, Mutant
from sim.scenarios import SCENARIOS
from sim.simulation import run_seed
from sim.world import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True)
class Trophy:
    """Where a mutant was caught."""

    mutant: Mutant
    seed: int | None
    """The first seed that catches it; None if none did."""
    scenarios: tuple[str, ...]
    """The directed scenarios that catch it."""


def hunt(seeds: int) -> Iterator[Trophy]:
    """Hunts every mutant from seed 0 on, and in all scenarios."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        tasks = [(index, range(seeds)) for index in range(len(MUTANTS))]
        yield from pool.imap(_hunt_one, tasks)


def _hunt_one(task: tuple[int, Sequence[int]]) -> Trophy:
    index, seeds = task
    mutant = MUTANTS[index]
    return Trophy(mutant, first_seed(mutant, seeds), tuple(scenarios_that_catch(mutant)))


def first_seed(mutant: Mutant, seeds: Iterable[int]) -> int | None:
    """Returns the first of the seeds that catches the mutant."""
    return next((seed for seed in seeds if run_seed(seed, mutant.cores).failure), None)


def scenarios_that_catch(mutant: Mutant) -> Iterator[str]:
    """Names the directed scenarios in which the mutant breaks a promise."""
    for scenario in SCENARIOS:
        try:
            scenario(mutant.cores)
        except Violation:
            yield scenario.__name__
