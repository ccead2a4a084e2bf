"""Measures what routers cost, prints tables and writes them to a file.

    python -m bench.router [--fast] [--rounds N] [--only NAME,...] [--out FILE]
                           [--example-proxy FILE]

A full run takes an hour. What a router needs and is not there is said, and that router left out.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lease.machine import facts, load_average
from bench.router import phases as measuring
from bench.router.machine import OTHER_CPU, ROUTER_CPU, BenchError
from bench.router.report import PEER, figures, foreign, ratios
from bench.router.rig import build, nodes
from bench.router.routers import Router, routers, running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.router.phases import Measured, Scale

RESULTS = Path(__file__).with_name("RESULTS.md")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    args = _parse(argv)
    wanted = _wanted(args)
    if not {ROUTER_CPU, OTHER_CPU} <= os.sched_getaffinity(0):
        print("bench.router: needs the CPUs 0 and 1", file=sys.stderr)
        return 1
    machine, before = facts(), load_average()
    try:
        build()
        tables = _measure(wanted, measuring.FAST if args.fast else measuring.FULL, args.rounds)
    except BenchError as error:
        print(f"bench.router: {error}", file=sys.stderr)
        return 1
    text = "\n".join([_head(wanted, machine, before), *tables])
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.router", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="try every step, with a few turns each")
    parser.add_argument("--rounds", type=int, help="rounds over all routers, there and back (3)")
    parser.add_argument("--only", help=f"routers by name, measured next to {PEER}; writes no file")
    parser.add_argument("--out", type=Path, help="where to write the tables; default RESULTS.md")
    parser.add_argument(
        "--example-proxy",
        type=Path,
        help="disagg_proxy_multiturn.py of vLLM's source distribution, in its examples/",
    )
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 1 if args.fast else 3
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    names = [router.name for router in routers(args.example_proxy)]
    # Names have commas in them, so they are looked for in what is given.
    args.names = names if args.only is None else [name for name in names if name in args.only]
    if not args.names:
        parser.error(f"--only must name some of: {'; '.join(names)}")
    args.names.append(PEER)
    if args.out is None and args.only is None and not args.fast:
        args.out = RESULTS
    return args


def _wanted(args: argparse.Namespace) -> list[Router]:
    wanted = [one for one in routers(args.example_proxy) if one.name in args.names]
    for router in wanted:
        if router.missing:
            print(f"bench.router: without {router.name}: {router.missing}", file=sys.stderr)
    return [router for router in wanted if not router.missing]


def _measure(wanted: list[Router], scale: Scale, rounds: int) -> list[str]:
    measured: dict[str, list[dict[str, Measured]]] = {}
    memory: dict[str, float] = {}
    for number in range(rounds):
        # There and back, so that what changes with time cancels out.
        for router in wanted if number % 2 == 0 else reversed(wanted):
            print(f"round {number + 1}: {router.name}", flush=True)
            measured.setdefault(router.name, []).append(_round(router, scale))
            if number == 0 and router.command is not None and not router.known:
                memory[router.name] = _memory(router, scale)
    tables = [figures(wanted, measured, memory).markdown()]
    compared = ratios(wanted, measured)
    if compared is not None:
        tables.append(compared.markdown())
    tables.append(f"Others kept {foreign(measured):.2f} of a CPU busy meanwhile.\n")
    return tables


def _round(router: Router, scale: Scale) -> dict[str, Measured]:
    done = {}
    with nodes(router.pairs) as engines, running(router, engines) as (program, to):
        measuring.warm_up(router, to, engines, scale)
        for phase in measuring.phases(scale):
            one = measuring.measure(router, phase, program, to, engines)
            print(
                f"  {phase.name:9s} {one.cpu_us:8.1f} CPU us a turn, first byte"
                f" {one.loaded.first_p50_us:7.0f} us, others {one.foreign:.2f}",
                flush=True,
            )
            done[phase.name] = one
    return done


def _memory(router: Router, scale: Scale) -> float:
    # A fresh process, so that what the phases left behind is not counted.
    with nodes(router.pairs) as engines, running(router, engines) as (program, to):
        assert program is not None
        return measuring.memory(program, to, engines, scale)


def _head(wanted: Sequence[Router], machine: str, load_before: str) -> str:
    list_of = "\n".join(f"- **{router.name}**: {router.about}" for router in wanted)
    return (
        "# What the router costs\n\n"
        f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} by `make bench-router` on "
        f"{machine}. Figures are medians over rounds, with the least and the most in parentheses. "
        "Every answer was checked, and that prefill's KV reached decode with its own prompt. Load "
        f"average before: {load_before}; after: {load_average()}.\n\n{list_of}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
