"""Operations per second, latencies and CPU time of each operation, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from bench.lease import workload
from bench.lease.figures import Spread, Table
from bench.lease.fleet import EngineSession, Fleet
from bench.lease.load import Timing, closed_loop
from bench.lease.processes import BenchError, Cores, ServerProcess
from kvturn.v1 import lease_pb2, lease_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

IN_FLIGHT = 16
_DEADLINE_S = 10.0
_BLOCKS = "100000000"
_TOKENS = "1000000000000"
_OPERATIONS = ("Grant", "ResolveConversation", "BeginRead", "EndRead", "heartbeat")


@dataclass(frozen=True, slots=True)
class Setting:
    """How much the service holds while it is measured."""

    leases: int
    engines: int
    store: str = ""
    """As `--store` takes it; empty for the memory store."""
    prefix: str = ""
    """What the keys in etcd begin with: services that are not of one cluster need two."""

    def cells(self) -> tuple[str, ...]:
        """Returns the columns of the table that tell it."""
        return f"{self.leases:,}", f"{self.engines:,}", self.store.partition(":")[0] or "memory"


@dataclass(slots=True)
class Rounds:
    """One operation's figures, one of each per round."""

    per_second: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)

    def note(self, crowd: Timing, cpu_ns: int, alone: Timing) -> None:
        """Adds a round: `crowd` with many calls in flight, `alone` with one."""
        self.per_second.append(crowd.per_second)
        self.cpu_us.append(cpu_ns / crowd.count / 1_000)
        self.p50_ms.append(alone.percentile_ms(0.5))
        self.p99_ms.append(alone.percentile_ms(0.99))

    def cells(self, yardstick: Rounds | None = None) -> tuple[str, ...]:
        """Returns the columns of the table, from "per second" on."""
        relative = ""
        if yardstick is not None and yardstick is not self:
            pairs = zip(self.cpu_us, yardstick.cpu_us, strict=True)
            relative = Spread.of([own / other for own, other in pairs]).show(2)
        cpu = Spread.of(self.cpu_us)
        return (
            Spread.of(self.per_second).show(),
            cpu.show(),
            f"{1e6 / cpu.median:,.0f}",
            relative,
            Spread.of(self.p50_ms).show(2),
            Spread.of(self.p99_ms).show(2),
        )


COLUMNS = (
    "operation",
    "leases",
    "engines",
    "store",
    f"per second, {IN_FLIGHT} in flight",
    "CPU µs",
    "1 s / CPU",
    "relative",
    "p50 ms, one at a time",
    "p99 ms, one at a time",
)


class Reader:
    """Routers and prefill engines: one connection that asks about the leases of a fleet."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target)
        self._stub: Any = lease_pb2_grpc.LeaseServiceStub(self._channel)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)

    async def resolve(self, request: lease_pb2.ResolveConversationRequest) -> None:
        """Asks who holds a conversation that is held."""
        answer = await self._stub.ResolveConversation(request, timeout=_DEADLINE_S)
        if not answer.lease_id:
            raise BenchError(f"a conversation that is held was not found: {answer.verdict}")

    async def begin_read(self, request: lease_pb2.BeginReadRequest) -> None:
        """Takes the right to read a lease that nobody has read."""
        answer = await self._stub.BeginRead(request, timeout=_DEADLINE_S)
        if not answer.granted:
            raise BenchError(f"a lease that is held was not granted: {answer.verdict}")

    async def end_read(self, request: lease_pb2.EndReadRequest) -> None:
        """Reports that a read completed."""
        await self._stub.EndRead(request, timeout=_DEADLINE_S)

    async def wait_until_ready(self) -> None:
        """Waits until the service leads: with etcd it is elected first."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                try:
                    await self.count_leases()
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.05)

    async def count_leases(self) -> int:
        """Returns how many leases the service holds that have not ended."""
        answer = await self._stub.ListEngines(lease_pb2.ListEnginesRequest(), timeout=_DEADLINE_S)
        return sum(engine.lease_count for engine in answer.engines)


def service_args(setting: Setting, session_ttl_s: int = 3_600) -> list[str]:
    """Returns the command line of a lease service that has room for more, and ends nothing itself.

    Sessions too live for an hour unless told otherwise, so that a disturbed machine ends none.
    """
    per_engine = 2 * setting.leases // setting.engines + 5_000
    leases = per_engine * setting.engines
    return [
        *("-m", "kvturn_lease", "--port", "0", "--log-level", "ERROR"),
        *("--session-ttl", str(session_ttl_s), "--idle", "3600", "--max-hold", "7200"),
        *("--leases", str(leases), "--leases-per-tenant", str(leases)),
        *("--leases-per-engine", str(per_engine), "--queued-messages", str(per_engine + 1)),
        *("--blocks-per-engine", _BLOCKS, "--blocks-per-tenant", _BLOCKS),
        *("--tokens-per-engine", _TOKENS, "--tokens-per-tenant", _TOKENS),
        *(_etcd_args(setting) if setting.store else ()),
    ]


def _etcd_args(setting: Setting) -> tuple[str, ...]:
    # Longer than usual, so that a disturbed machine deposes nobody.
    store = ("--store", setting.store, "--etcd-prefix", setting.prefix)
    return (*store, "--leadership", "10")


@contextlib.asynccontextmanager
async def holding(
    service: ServerProcess, setting: Setting, points: int
) -> AsyncIterator[tuple[Fleet, Reader]]:
    """Opens sessions that hold so many leases, and checks at the end that the count is right."""
    fleet, reader = Fleet(service.target, setting.engines, points), Reader(service.target)
    try:
        await reader.wait_until_ready()
        await fleet.open(setting.leases)
        yield fleet, reader
        counted = await reader.count_leases()
        if counted != fleet.lease_count:
            raise BenchError(f"the service holds {counted} leases, not {fleet.lease_count}")
    finally:
        await fleet.close()
        await reader.close()


class Operations:
    """Measures each operation, round by round, on a service that holds a setting's leases."""

    def __init__(self, service: ServerProcess, fleet: Fleet, reader: Reader, batch: int) -> None:
        """`batch` calls of each kind are made in each half of a round."""
        self._service = service
        self._fleet = fleet
        self._reader = reader
        self._batch = batch
        self._rng = random.Random(batch)
        self.rounds: dict[str, Rounds] = defaultdict(Rounds)

    async def round(self, *, counts: bool) -> None:
        """Does everything once: new leases come, as many of the oldest are read and go."""
        gc.collect()
        crowd = await self._half(self._grant_crowd, IN_FLIGHT)
        alone = await self._half(self._grant_alone, 1)
        if counts:
            for name in _OPERATIONS:
                timing, cpu_ns = crowd[name]
                self.rounds[name].note(timing, cpu_ns, alone[name][0])

    async def _half(
        self, grant: Callable[[], Awaitable[Timing]], in_flight: int
    ) -> dict[str, tuple[Timing, int]]:
        fleet, reader, batch = self._fleet, self._reader, self._batch
        measured = {"Grant": await self._measure(grant)}
        held = range(fleet.oldest, fleet.newest + 1)
        resolves = [workload.resolve(number) for number in self._rng.choices(held, k=batch)]
        leases = fleet.take_oldest(batch)
        begins = [workload.begin_read(engine, number) for engine, number in leases]
        ends = [workload.end_read(engine, number, fleet.points) for engine, number in leases]
        engines = fleet.next_engines(in_flight)
        beats = [engines[index % len(engines)] for index in range(batch)]
        batches: tuple[tuple[str, Callable[[Any], Awaitable[None]], Sequence[Any]], ...] = (
            ("ResolveConversation", reader.resolve, resolves),
            ("BeginRead", reader.begin_read, begins),
            ("EndRead", reader.end_read, ends),
            ("heartbeat", EngineSession.heartbeat, beats),
        )
        for name, call, requests in batches:
            load = functools.partial(closed_loop, call, requests, in_flight)
            measured[name] = await self._measure(load)
        await fleet.heartbeat_all()
        return measured

    async def _grant_crowd(self) -> Timing:
        before_ns = time.perf_counter_ns()
        await self._fleet.grant(self._batch, IN_FLIGHT)
        return Timing(self._batch, [], time.perf_counter_ns() - before_ns)

    async def _grant_alone(self) -> Timing:
        fleet = self._fleet
        engines = fleet.next_engines(self._batch)
        granting = [engines[index % len(engines)] for index in range(self._batch)]
        return await closed_loop(
            lambda engine: engine.grant_and_wait(fleet.new_number(engine)), granting, 1
        )

    async def _measure(self, load: Callable[[], Awaitable[Timing]]) -> tuple[Timing, int]:
        before = self._service.usage()
        timing = await load()
        return timing, self._service.usage().since(before).cpu_ns


async def measure_operations(
    title: str, settings: Sequence[Setting], points: int, cores: Cores, rounds: int, batch: int
) -> Table:
    """Returns what each operation takes on a service with each setting's leases."""
    echoes = Rounds()
    async with contextlib.AsyncExitStack() as running:
        echo = await running.enter_async_context(echoing(points, cores))
        services = [
            await running.enter_async_context(_operating(setting, points, cores, batch))
            for setting in settings
        ]
        for number in range(rounds + 1):  # the first one warms up
            round_of_echo = await _round_of_echo(*echo, batch)
            if number > 0:
                echoes.note(*round_of_echo)
            for service in services:
                await service.round(counts=number > 0)
    rows = [("echo", "", "", "", *echoes.cells())]
    for name in _OPERATIONS:
        yardsticks: dict[int, Rounds] = {}
        for setting, service in zip(settings, services, strict=True):
            figures = service.rounds[name]
            yardstick = yardsticks.setdefault(setting.engines, figures)
            rows.append((name, *setting.cells(), *figures.cells(yardstick)))
    return Table(
        title,
        f"A real service process for each setting, all on one core, their rounds in turns. "
        f"{rounds} rounds of {batch:,} calls of each kind, {IN_FLIGHT} in flight and then one at a "
        f"time; {points} digest points per lease. Every round grants new leases and reads as "
        "many of the oldest, so the number held stays. *CPU* is the service's, for all its "
        "threads; what else runs disturbs it least. *1 s / CPU* is what a core could do if it did "
        "nothing else; *relative* is CPU, round by round, over that of the operation's first row "
        "with as many engines. A Grant has no answer: its time is until the acknowledgement of a "
        "heartbeat sent right behind it. The echo is a bare grpc.aio server with messages of "
        "BeginRead's size: the ceiling of this generator.",
        COLUMNS,
        rows,
    )


@contextlib.asynccontextmanager
async def _operating(
    setting: Setting, points: int, cores: Cores, batch: int
) -> AsyncIterator[Operations]:
    with ServerProcess("lease service", service_args(setting), cores.server) as service:
        async with holding(service, setting, points) as (fleet, reader):
            yield Operations(service, fleet, reader, batch)


@contextlib.asynccontextmanager
async def echoing(points: int, cores: Cores) -> AsyncIterator[tuple[ServerProcess, Reader]]:
    """Runs a bare server that answers BeginRead with as many bytes."""
    args = ["-m", "bench.lease.echo", "--points", str(points)]
    with ServerProcess("echo", args, cores.server) as service:
        reader = Reader(service.target)
        try:
            yield service, reader
        finally:
            await reader.close()


async def _round_of_echo(
    service: ServerProcess, reader: Reader, batch: int
) -> tuple[Timing, int, Timing]:
    requests = [workload.begin_read(1, number) for number in range(1, batch + 1)]
    before = service.usage()
    crowd = await closed_loop(reader.begin_read, requests, IN_FLIGHT)
    cpu_ns = service.usage().since(before).cpu_ns
    return crowd, cpu_ns, await closed_loop(reader.begin_read, requests, 1)
