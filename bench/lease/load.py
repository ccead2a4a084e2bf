"""The load generator: so many calls in flight, or calls at a given rate."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bench.lease.figures import percentile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

NANOSECONDS_PER_SECOND = 1_000_000_000

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class Timing:
    """What one batch of calls took."""

    count: int
    """Calls that were answered."""
    latencies_ns: list[int]
    """Of each call, in no order; empty where calls are not answered one by one."""
    elapsed_ns: int

    @property
    def per_second(self) -> float:
        """Calls answered per second."""
        return self.count * NANOSECONDS_PER_SECOND / self.elapsed_ns

    def percentile_ms(self, fraction: float) -> float:
        """Returns a percentile of the latencies."""
        return percentile(self.latencies_ns, fraction) / 1e6


async def closed_loop(
    call: Callable[[Request], Awaitable[object]], requests: Sequence[Request], in_flight: int
) -> Timing:
    """Makes every call, `in_flight` at a time; the next one starts when one is answered."""
    latencies_ns: list[int] = []
    left = iter(requests)

    async def work() -> None:
        for request in left:
            before_ns = time.perf_counter_ns()
            await call(request)
            latencies_ns.append(time.perf_counter_ns() - before_ns)

    started_ns = time.perf_counter_ns()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return Timing(len(requests), latencies_ns, time.perf_counter_ns() - started_ns)


async def open_loop(
    call: Callable[[Request], Awaitable[object]],
    requests: Sequence[Request],
    per_second: float,
    seed: int,
) -> Timing:
    """Makes the calls at random times (Poisson) at a mean rate, whether or not others are answered.

    A latency counts from when the call was due, so that neither a slow answer nor a late start
    hides what the calls behind it had to wait.
    """
    rng = random.Random(seed)
    gap_ns = NANOSECONDS_PER_SECOND / per_second
    due_ns, schedule = 0.0, []
    for _ in requests:
        due_ns += rng.expovariate(1) * gap_ns
        schedule.append(int(due_ns))
    loop = asyncio.get_running_loop()
    calls: set[asyncio.Task[None]] = set()
    latencies_ns: list[int] = []
    all_started = asyncio.Event()

    async def make(request: Request, due_ns: int) -> None:
        await call(request)
        latencies_ns.append(time.perf_counter_ns() - due_ns)

    def start(request: Request, due_ns: int) -> None:
        calls.add(asyncio.create_task(make(request, due_ns)))

    def pace(started_ns: int) -> None:
        # The event loop's own timers count milliseconds; a thread's sleep is exact to 0.1 ms.
        for request, offset_ns in zip(requests, schedule, strict=True):
            wait_ns = started_ns + offset_ns - time.perf_counter_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / NANOSECONDS_PER_SECOND)
            loop.call_soon_threadsafe(start, request, started_ns + offset_ns)
        loop.call_soon_threadsafe(all_started.set)

    started_ns = time.perf_counter_ns()
    threading.Thread(target=pace, args=(started_ns,), daemon=True).start()
    await all_started.wait()
    await asyncio.gather(*calls)
    return Timing(len(requests), latencies_ns, time.perf_counter_ns() - started_ns)
