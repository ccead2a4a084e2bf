"""Random worlds of the real cores keep every promise, and are the same each time."""

from __future__ import annotations

from sim.simulation import run_seed


def test_the_same_seed_twice_gives_the_same_event_log() -> None:
    """A seed that failed can be looked at again."""
    first, again = run_seed(7, traced=True), run_seed(7, traced=True)
    assert first.log
    assert first.log == again.log
