"""CPU of engines that have nothing to do, with and without retentions on decode."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine.stacks import hold_turn, ours, patient_stock, stock
from bench.lease.figures import Table
from kvturn_cli.leash import descendants

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

SETUPS = (
    stock("stock"),
    patient_stock("stock, progress delay 1 ms"),
    ours("kvturn, progress delay 1 ms"),
)
RETENTIONS = 4
TOKENS = 400
SETTLE_S = 5.0
WINDOW_S = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure_idle(version: str) -> Table:
    """Measures every set-up; minutes, most of them starting engines."""
    rows = []
    for setup in SETUPS:
        with setup.stack(version) as stack:
            before = _idle_percent(stack)
            for index in range(RETENTIONS):
                hold_turn(stack, f"held-{index}", TOKENS)
            after = _idle_percent(stack)
        rows.append((setup.name, *(f"{value:.1f}" for value in (*before, *after))))
        print(rows[-1], flush=True)
    return Table(
        f"Idle engines, vLLM {version}",
        f"CPU of each engine's processes in percent of a core, over {WINDOW_S:.0f} s without "
        f'requests; "held" is with {RETENTIONS} retentions of about {TOKENS} tokens on decode. '
        "Stock is bidirectional, with its TTL of 480 s. NIXL's own progress thread spins; where it "
        "may sleep a millisecond between looks, what the connectors cost shows.",
        ("connector", "prefill", "decode", "prefill, held", "decode, held"),
        rows,
    )


def _idle_percent(stack: Stack) -> list[float]:
    time.sleep(SETTLE_S)
    began_s = [_cpu_s(stack, name) for name in ("prefill-0", "decode-0")]
    time.sleep(WINDOW_S)
    ended_s = [_cpu_s(stack, name) for name in ("prefill-0", "decode-0")]
    return [100 * (ended - began) / WINDOW_S for began, ended in zip(began_s, ended_s, strict=True)]


def _cpu_s(stack: Stack, name: str) -> float:
    leash = next(process for process in stack.processes if process.name == name)
    assert leash.id is not None
    ticks = 0
    for pid in descendants(leash.id.pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S
