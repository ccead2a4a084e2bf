"""BeginRead at a steady rate against an echo of the same size, in turns on the same core."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bench.lease import workload
from bench.lease.figures import Spread, Table
from bench.lease.load import Timing, closed_loop, open_loop
from bench.lease.operations import IN_FLIGHT, Reader, Setting, echoing, holding, service_args
from bench.lease.processes import Cores, ServerProcess, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.lease.fleet import Fleet

PER_SECOND = 1_000


class Contender(Protocol):
    """Something that is asked at the same rate as the others."""

    name: str

    async def prepare(self, count: int) -> Sequence[Any]:
        """Returns so many requests; not measured."""

    async def ask(self, request: Any) -> object:
        """Makes one call."""

    async def finish(self, requests: Sequence[Any]) -> None:
        """Cleans up after the calls; not measured."""

    def usage(self) -> Usage:
        """Returns what its server had of its core."""


class LeaseReads:
    """BeginRead of a lease service; the leases are granted before a round and ended after it."""

    def __init__(self, name: str, service: ServerProcess, fleet: Fleet, reader: Reader) -> None:
        self.name = name
        self.ask = reader.begin_read
        self.usage = service.usage
        self._fleet = fleet
        self._reader = reader
        self._reading: list[tuple[int, int]] = []

    async def prepare(self, count: int) -> Sequence[Any]:
        """Grants as many leases as will be read."""
        await self._fleet.grant(count, IN_FLIGHT)
        self._reading = self._fleet.take_oldest(count)
        return [workload.begin_read(engine, number) for engine, number in self._reading]

    async def finish(self, requests: Sequence[Any]) -> None:
        """Ends the reads, and lets the engines acknowledge the releases."""
        points = self._fleet.points
        ends = [workload.end_read(engine, number, points) for engine, number in self._reading]
        await closed_loop(self._reader.end_read, ends, IN_FLIGHT)
        await self._fleet.heartbeat_all()


class EchoedReads:
    """The same questions, answered by the echo."""

    name = "echo of the same size"

    def __init__(self, service: ServerProcess, reader: Reader) -> None:
        self.ask = reader.begin_read
        self.usage = service.usage

    async def prepare(self, count: int) -> Sequence[Any]:
        """Returns questions about leases that need not exist."""
        return [workload.begin_read(1, number) for number in range(1, count + 1)]

    async def finish(self, requests: Sequence[Any]) -> None:
        """Has nothing to clean up."""


@contextlib.asynccontextmanager
async def leasing(
    name: str, setting: Setting, points: int, cores: Cores
) -> AsyncIterator[LeaseReads]:
    """Runs a lease service that holds a setting's leases."""
    with ServerProcess("lease service", service_args(setting), cores.server) as service:
        async with holding(service, setting, points) as (fleet, reader):
            yield LeaseReads(name, service, fleet, reader)


@dataclass(slots=True)
class Answers:
    """One contender's figures, one of each per round."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def note(self, timing: Timing, usage: Usage) -> None:
        """Adds a round."""
        self.p50_ms.append(timing.percentile_ms(0.5))
        self.p99_ms.append(timing.percentile_ms(0.99))
        self.cpu_us.append(usage.cpu_ns / timing.count / 1_000)
        self.waited.append(100 * usage.waited_ns / timing.elapsed_ns)

    def cells(self, yardstick: Answers) -> tuple[str, ...]:
        """Returns the columns of the table; ratios are round by round."""
        return (
            Spread.of(self.p50_ms).show(2),
            Spread.of(self.p99_ms).show(2),
            Spread.of(self.cpu_us).show(),
            Spread.of(self.waited).show(1),
            _ratios(self.p50_ms, yardstick.p50_ms).show(2),
            _ratios(self.p99_ms, yardstick.p99_ms).show(2),
        )


def _ratios(values: Sequence[float], yardstick: Sequence[float]) -> Spread:
    return Spread.of([value / of for value, of in zip(values, yardstick, strict=True)])


async def compare(contenders: Sequence[Contender], rounds: int, count: int) -> dict[str, Answers]:
    """Asks each contender `count` times a round at the steady rate; their rounds alternate."""
    answers = {each.name: Answers() for each in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            requests = await contender.prepare(count)
            before = contender.usage()
            timing = await open_loop(contender.ask, requests, PER_SECOND, seed=number)
            usage = contender.usage().since(before)
            await contender.finish(requests)
            if number > 0:  # the first one warms up
                answers[contender.name].note(timing, usage)
    return answers


COLUMNS = ("server", "p50 ms", "p99 ms", "CPU µs", "waited %")


async def measure_questions(
    setting: Setting, points: int, cores: Cores, rounds: int, count: int
) -> Table:
    """Returns BeginRead's latencies at the steady rate beside those of an echo."""
    async with (
        echoing(points, cores) as (service, reader),
        leasing("BeginRead", setting, points, cores) as reads,
    ):
        echo = EchoedReads(service, reader)
        answers = await compare((echo, reads), rounds, count)
    rows = [(name, *each.cells(answers[echo.name])) for name, each in answers.items()]
    return Table(
        f"BeginRead at {PER_SECOND:,} a second",
        f"{rounds} rounds of {count:,} calls at random times (Poisson); a latency counts from "
        f"when the call was due. The service holds {setting.leases:,} leases of {points} digest "
        f"points on {setting.engines} engines. The echo is a bare grpc.aio server that answers "
        "with as many bytes and reads nothing. *Waited* is how long the server's threads together "
        "could have run while something else, or another of them, had their core.",
        (*COLUMNS, "p50 / echo", "p99 / echo"),
        rows,
    )
