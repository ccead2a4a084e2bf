"""One job of a long run: round after round of examples, until its CPU time is used up."""

from __future__ import annotations

import hashlib
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.bodies import ROUTES, bodies, good_bodies
from fuzz.calls import calls
from fuzz.checks import check_body
from fuzz.front import Front
from fuzz.streams import streams, wrong_streams

if TYPE_CHECKING:
    from collections.abc import Callable

_EXAMPLES: Final = 1_000
_FOUND: Final = Path("build/fuzz")
_FDS_MORE_MAX: Final = 50
"""More file descriptors than a job may have at its end than at its first round's."""


class _Target(NamedTuple):
    name: str
    examples: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    data: Callable[[Any], bytes]


class Hunt(NamedTuple):
    """What one job did."""

    tried: int
    faults: list[str]


def hunt(first_seed: int, cpu_s: float) -> Hunt:
    """Tries examples of every sort for so much CPU time, and prints how far it is."""
    warnings.simplefilter("ignore")
    tried, rounds, fds = 0, 0, 0
    faults: dict[str, str] = {}
    with Front() as front:
        targets = _targets(front)
        while time.process_time() < cpu_s:
            target = targets[rounds % len(targets)]
            tried += _EXAMPLES
            fault = _try(target, first_seed * 1_000_003 + rounds)
            if fault is not None:
                faults.setdefault(fault.splitlines()[-1], fault)
            rounds += 1
            if rounds == len(targets):
                fds = _fds()
            if rounds % len(targets) == 0:
                minutes = time.process_time() / 60
                print(f"{minutes:.1f} CPU minutes, {tried} tried, {len(faults)} faults", flush=True)
        more = _fds() - fds
    if fds and more > _FDS_MORE_MAX:
        faults["fds"] = f"{more} file descriptors are left"
    return Hunt(tried, list(faults.values()))


def _fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _targets(front: Front) -> list[_Target]:
    places = st.lists(st.integers(0, 5_000), max_size=12)
    routes = st.sampled_from(ROUTES)
    return [
        _Target("body", st.tuples(bodies, routes), lambda x: check_body(*x), lambda x: x[0]),
        _Target("stream", streams, front.check_stream, lambda x: x.data),
        _Target("good", st.tuples(good_bodies, routes), lambda x: check_body(*x), lambda x: x[0]),
        _Target(
            "wrong",
            st.tuples(wrong_streams, places),
            lambda x: front.check_stream(*x),
            lambda x: x[0].data,
        ),
        _Target("cut", st.tuples(streams, places), front.check_cuts, lambda x: x[0].data),
        _Target("call", calls, front.check_call, lambda x: x.message),
    ]


def _try(target: _Target, number: int) -> str | None:
    """Tries many examples; returns what went wrong with the least of those that fail."""
    failing: list[Any] = []

    @seed(number)
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(target.examples)
    def run(example: Any) -> None:
        try:
            target.check(example)
        except BaseException:
            failing[:] = [example]
            raise

    try:
        run()
    except Exception:
        data = target.data(failing[0]) if failing else b""
        name = _FOUND / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(data)
        return f"{name} (seed {number})\n{traceback.format_exc(limit=-4)}"
    return None
