"""Directed scenarios on the simulated world: the real cores keep every promise in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.cores import Cores
from sim.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_real_cores_keep_every_promise(scenario: Callable[[Cores], None]) -> None:
    """See the scenario's own text."""
    scenario(Cores())
