"""What is measured of a router, and how."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.router.machine import BenchError, Foreign, Program, awake
from bench.router.rig import Load, Loaded, load
from bench.router.routers import spans_exported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.router.rig import Nodes
    from bench.router.routers import Router

KIB: Final = 1024
CHUNKS: Final = 32
LONG_CHUNKS: Final = 512
SPANS_A_TURN: Final = 5


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement. `hot` keeps the CPUs from halting."""

    name: str
    load: Load
    hot: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: `seconds` per busy phase, `turns` per paced one."""

    seconds: float
    turns: int
    conversations: int
    """Of which the memory is measured."""
    known: float
    """Share of the conversations that a router is to know before."""


FULL: Final = Scale(seconds=8, turns=640, conversations=20_000, known=1.0)
FAST: Final = Scale(seconds=0.5, turns=40, conversations=500, known=0.01)


def phases(scale: Scale) -> list[Phase]:
    """Returns the phases, in their order."""

    def busy(name: str, body: int, chunks: int = CHUNKS) -> Phase:
        arguments = f"--conns 32 --seconds {scale.seconds} --tokens {chunks} --body {body}"
        return Phase(name, Load(arguments))

    def paced(name: str, chunks: int, turns: int) -> Phase:
        arguments = f"--conns 32 --requests {turns} --tokens {chunks} --stagger-us 5000"
        return Phase(name, Load(f"{arguments} --body {8 * KIB}", interval_us=5_000))

    def alone(name: str, body: int) -> Phase:
        arguments = f"--conns 1 --requests {scale.turns // 2} --tokens 8 --body {body}"
        return Phase(name, Load(arguments, interval_us=1_000), hot=True)

    return [
        busy("asap8", 8 * KIB),
        busy("asap128", 128 * KIB),
        paced("paced32", CHUNKS, scale.turns),
        paced("paced512", LONG_CHUNKS, max(64, scale.turns // 8)),
        alone("first8", 8 * KIB),
        alone("first128", 128 * KIB),
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """One phase: what the client saw, the router's CPU time per turn, how much of it was the
    kernel's, and what others took."""

    loaded: Loaded
    cpu_us: float
    kernel_us: float
    foreign: float


def warm_up(router: Router, to: Sequence[str], nodes: Nodes, scale: Scale) -> None:
    """Has a router serve what it is to have served before. Raises BenchError."""
    nodes.pace(0)
    turns = max(800, int(router.known * scale.known))
    arguments = f"--conns 8 --requests {turns} --tokens 4 --body {KIB if router.known else 8 * KIB}"
    if load(to, Load(arguments)).bad:
        raise BenchError(f"{router.name} failed turns while it was warmed up")


def measure(
    router: Router, phase: Phase, program: Program | None, to: Sequence[str], nodes: Nodes
) -> Measured:
    """Runs one phase. Raises BenchError if a turn failed or was not traced."""
    nodes.pace(phase.load.interval_us)
    with awake() if phase.hot else nullcontext():
        foreign = Foreign()
        before, nodes_before_s = nodes.stats(), nodes.program.cpu_s()
        spans = spans_exported() if router.traced else 0
        router_s, kernel_s = (program.cpu_s(), program.kernel_s()) if program else (0.0, 0.0)
        loaded = load(to, phase.load)
        if program:
            router_s, kernel_s = program.cpu_s() - router_s, program.kernel_s() - kernel_s
        own_s = router_s + loaded.client_cpu_s + nodes.program.cpu_s() - nodes_before_s
        share = 0.0 if phase.hot else foreign.share(own_s)
    after = nodes.stats()
    handed = after["kv_ok"] - before["kv_ok"]
    if loaded.bad or handed < loaded.good:
        raise BenchError(
            f"{router.name}, {phase.name}: {loaded.bad} turns failed, and of {loaded.good}"
            f" {handed} got prefill's KV"
        )
    if router.traced:
        time.sleep(1)  # the exporter's pace
        traced = (spans_exported() - spans) / SPANS_A_TURN
        if traced < loaded.good:
            raise BenchError(f"{router.name}, {phase.name}: {traced} of {loaded.good} were traced")
    return Measured(loaded, router_s / loaded.good * 1e6, kernel_s / loaded.good * 1e6, share)


def memory(program: Program, to: Sequence[str], nodes: Nodes, scale: Scale) -> float:
    """Returns the bytes that a conversation takes which the router has not seen before."""
    nodes.pace(0)
    known = Load(f"--conns 16 --requests 2000 --tokens 1 --turns 0 --body {8 * KIB}")
    load(to, known)
    time.sleep(0.5)
    before = program.rss_bytes()
    fresh = Load(f"--conns 16 --requests {scale.conversations} --tokens 1 --body {8 * KIB}")
    seen = load(to, fresh).good
    time.sleep(0.5)
    return (program.rss_bytes() - before) / seen
