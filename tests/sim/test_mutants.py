"""Every rule matters: a variant of the cores that breaks one is caught.

`make sim` hunts each mutant from seed 0; here the hunt begins where it was caught once.
"""

from __future__ import annotations

import pytest

from sim.hunt import first_caught, scenarios_that_catch
from sim.mutants import MUTANTS, Mutant

SEEDS = 400
"""Far more than any hunt has needed; a change of the world moves where a mutant is caught."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(mutant: Mutant) -> None:
    """By a directed scenario, else by a random world."""
    if any(scenarios_that_catch(mutant)):
        return
    outcome = first_caught(mutant, range(mutant.seed, mutant.seed + SEEDS))
    assert outcome is not None
    assert outcome.promise != "crash", outcome
