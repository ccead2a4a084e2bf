"""Measures what the lease service costs, prints tables and writes them to a file.

    python -m bench.lease [--fast] [--rounds N] [--only NAME,...] [--out FILE]

Servers run on one core, the load generator on another. A full run takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop

from bench.lease.core import measure_core
from bench.lease.etcd import EtcdScale, measure_etcd
from bench.lease.machine import Neighbours, facts, load_average
from bench.lease.memory import measure_memory
from bench.lease.operations import Setting, measure_operations
from bench.lease.processes import BenchError, Cores
from bench.lease.questions import measure_questions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.lease.figures import Table


RESULTS = Path(__file__).with_name("RESULTS.md")
SECTIONS = ("core", "operations", "questions", "memory", "etcd")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    points: int
    rounds: int
    batch: int
    core: tuple[Setting, ...]
    operations: tuple[Setting, ...]
    questions: Setting
    questions_a_round: int
    memory: tuple[tuple[int, int], ...]
    """(leases, digest points)."""
    etcd: EtcdScale


FULL = Scale(
    points=64,
    rounds=5,
    batch=500,
    core=(Setting(1_000, 10), Setting(10_000, 10), Setting(100_000, 10), Setting(100_000, 1_000)),
    operations=(
        Setting(1_000, 1),
        Setting(1_000, 10),
        Setting(10_000, 10),
        Setting(100_000, 10),
        Setting(100_000, 100),
        Setting(100_000, 1_000),
    ),
    questions=Setting(100_000, 10),
    questions_a_round=1_000,
    memory=((100_000, 64), (10_000, 2_048)),
    etcd=EtcdScale(Setting(10_000, 10), heartbeat_s=10, grants=20_000),
)
FAST = Scale(
    points=4,
    rounds=1,
    batch=20,
    core=(Setting(50, 2), Setting(200, 2)),
    operations=(Setting(50, 2),),
    questions=Setting(100, 2),
    questions_a_round=50,
    memory=((100, 4),),
    etcd=EtcdScale(Setting(50, 2), heartbeat_s=0.5, grants=100),
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    args = _parse(argv)
    # The core is measured in this process as it runs in the service.
    gc.set_threshold(10_000, 20, 1_000)
    try:
        tables = uvloop.run(_measure(args))
    except BenchError as error:
        print(f"bench.lease: {error}", file=sys.stderr)
        return 1
    except grpc.aio.AioRpcError as error:
        print(f"bench.lease: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    if args.out is not None:
        args.out.write_text("\n".join(tables))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.lease", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="try every step, with a few calls each")
    parser.add_argument("--rounds", type=int, help=f"rounds of each measurement ({FULL.rounds})")
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}; writes no file")
    parser.add_argument("--out", type=Path, help="where to write the tables; default RESULTS.md")
    args = parser.parse_args(argv)
    args.sections = SECTIONS if args.only is None else tuple(args.only.split(","))
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--only must name some of {','.join(SECTIONS)}, not {unknown.pop()}")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.out is None and args.only is None and not args.fast:
        args.out = RESULTS
    return args


async def _measure(args: argparse.Namespace) -> list[str]:
    """Prints each table as it comes; returns the whole document."""
    scale = FAST if args.fast else FULL
    rounds = args.rounds or scale.rounds
    cores = Cores.choose()
    machine, before = facts(), load_average()
    os.sched_setaffinity(0, cores.generator)
    tables = []
    for name in args.sections:
        neighbours = Neighbours()
        section = [table.markdown() for table in await _section(name, scale, rounds, cores)]
        section.append(f"Others kept {neighbours.busy_cores():.1f} cores busy.\n")
        tables.append("\n".join(section))
        print(tables[-1], flush=True)
    head = _head(cores, machine, before)
    print(head)
    return [head, *tables]


async def _section(name: str, scale: Scale, rounds: int, cores: Cores) -> list[Table]:
    points, batch, questions = scale.points, scale.batch, scale.questions_a_round
    match name:
        case "core":
            return [measure_core(scale.core, points, 2 * rounds, batch)]
        case "operations":
            return [
                await measure_operations(
                    "Operations over gRPC", scale.operations, points, cores, rounds, batch
                )
            ]
        case "questions":
            return [await measure_questions(scale.questions, points, cores, 2 * rounds, questions)]
        case "memory":
            return [await measure_memory(scale.memory, cores)]
        case _:
            return await measure_etcd(
                scale.etcd, points, cores, rounds=rounds, batch=batch, questions=questions
            )


def _head(cores: Cores, machine: str, load_before: str) -> str:
    pinned = (
        "Servers were pinned to one core and the load generator to another."
        if cores.apart
        else "There was one core: servers and the load generator shared it."
    )
    return (
        "# What the lease service costs\n\n"
        f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} by `make bench-lease` on "
        f"{machine}. {pinned} Figures are medians over rounds, the first one as a "
        "warm-up left out, with the least and the most in parentheses. Load average before: "
        f"{load_before}; after: {load_average()}.\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
