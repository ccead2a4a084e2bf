"""The tables that RESULTS.md is made of."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bench.lease.figures import Spread, Table
from bench.router.phases import CHUNKS, LONG_CHUNKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.router.phases import Measured
    from bench.router.routers import Router

    Round = dict[str, Measured]
    """One round of a router: its phases by name."""

    Figure = Callable[[Round], float]

PEER = "vllm-router"
"""Whose figures ratios refer to."""


def _cpu(phase: str) -> Figure:
    return lambda measured: measured[phase].cpu_us


def _kernel(phase: str) -> Figure:
    return lambda measured: measured[phase].kernel_us


def _first(phase: str) -> Figure:
    return lambda measured: measured[phase].loaded.first_p50_us


def _chunk(measured: Round) -> float:
    more = measured["paced512"].cpu_us - measured["paced32"].cpu_us
    return more / (LONG_CHUNKS - CHUNKS)


def _turns(measured: Round) -> float:
    loaded = measured["asap8"].loaded
    return loaded.good / loaded.seconds


_FIGURES: tuple[tuple[str, Figure, int], ...] = (
    ("CPU µs a turn, 8 KB", _cpu("asap8"), 0),
    ("CPU µs in the kernel, 8 KB", _kernel("asap8"), 0),
    ("CPU µs a turn, 128 KB", _cpu("asap128"), 0),
    ("CPU µs in the kernel, 128 KB", _kernel("asap128"), 0),
    ("CPU µs a paced chunk", _chunk, 1),
    ("CPU µs a paced turn", _cpu("paced32"), 0),
    ("first byte µs, 8 KB", _first("first8"), 0),
    ("first byte µs, 128 KB", _first("first128"), 0),
    ("turns a second", _turns, 0),
)


def figures(
    routers: Sequence[Router], rounds: dict[str, list[Round]], memory: dict[str, float]
) -> Table:
    """Returns what each router costs."""
    rows = []
    for router in routers:
        if router.name not in rounds:
            continue
        costs = router.command is not None
        cells = [
            Spread.of([figure(measured) for measured in rounds[router.name]]).show(digits)
            if costs or not name.startswith("CPU")
            else ""
            for name, figure, digits in _FIGURES
        ]
        taken = f"{memory[router.name]:,.0f}" if router.name in memory else ""
        rows.append((router.name, *cells, taken))
    return Table(
        "What a turn costs",
        "The router's process tree on one CPU, engines and client on the other. *CPU* is the "
        "tree's user and system time over turns answered: with 32 connections and all 32 chunks of "
        "an answer at once, or *paced*, 32 streams with a chunk every 5 ms as in service, where a "
        "chunk's CPU is the slope from 32 to 512 chunks. *In the kernel* is the system time of it. "
        "*First byte* is the median with one connection, the CPUs kept from halting. *Bytes a "
        "conversation* is the growth of resident memory over conversations never seen before.",
        ("router", *(name for name, _, _ in _FIGURES), "bytes a conversation"),
        rows,
    )


def ratios(routers: Sequence[Router], rounds: dict[str, list[Round]]) -> Table | None:
    """Returns the same figures over those of the peer, round by round; None without it."""
    peer = rounds.get(PEER)
    if not peer:
        return None
    rows = []
    for router in routers:
        if router.name not in rounds or router.command is None:
            continue
        cells = [
            Spread.of(
                [
                    figure(measured) / figure(other)
                    for measured, other in zip(rounds[router.name], peer, strict=True)
                ]
            ).show(2)
            for _, figure, _ in _FIGURES
        ]
        rows.append((router.name, *cells))
    return Table(
        f"Over {PEER}'s",
        f"Each figure over {PEER}'s of the same round: below 1 is less CPU, an earlier byte, and "
        "fewer turns.",
        ("router", *(name for name, _, _ in _FIGURES)),
        rows,
    )


def foreign(rounds: dict[str, list[Round]]) -> float:
    """Returns the median share of a CPU that others took, over all phases."""
    shares = [
        one.foreign for measured in rounds.values() for each in measured for one in each.values()
    ]
    return statistics.median(shares) if shares else 0.0
