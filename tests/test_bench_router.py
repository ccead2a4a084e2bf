"""The least relay carries turns as a router must, and so is a fair floor for what one costs."""

from __future__ import annotations

import os
import shutil

import pytest

from bench.router.machine import OTHER_CPU, ROUTER_CPU
from bench.router.rig import Load, build, load, nodes
from bench.router.routers import routers, running

RELAY = next(router for router in routers(None) if router.name == "least relay")

needs_rig = pytest.mark.skipif(
    shutil.which("cc") is None or not {ROUTER_CPU, OTHER_CPU} <= os.sched_getaffinity(0),
    reason="the benchmark's engines need a C compiler and the CPUs 0 and 1",
)


@needs_rig
@pytest.mark.parametrize(("body_bytes", "interval_us"), [(8 << 10, 200), (300 << 10, 0)])
def test_the_least_relay_carries_turns(body_bytes: int, interval_us: int) -> None:
    """Answers come whole, all at once or chunk by chunk, and each prompt's own KV reached decode.

    Prefill is asked for one token, not streamed: the engines count what it is asked otherwise.
    """
    build()
    with nodes(1) as engines, running(RELAY, engines) as (_, to):
        before = engines.stats()
        engines.pace(interval_us)
        done = load(to, Load(f"--conns 4 --requests 24 --tokens 32 --body {body_bytes}"))
        after = engines.stats()
    assert (done.good, done.bad) == (24, 0)
    asked = {name: after[name] - before[name] for name in after}
    assert asked["kv_ok"] == 24
    assert asked["kv_bad"] == asked["kv_missing"] == asked["prefill_bad"] == 0
