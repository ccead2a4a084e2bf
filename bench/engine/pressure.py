"""One-turn conversations that overfill decode's KV memory: does a turn wait for a retention?"""

from __future__ import annotations

import time

from bench.engine.stacks import hold_turn, ours, patient_stock
from bench.lease.figures import Table

STOCK_TTL_S = 30
SETUPS = (
    patient_stock("stock, bidirectional off", bidirectional_kv_xfer=False),
    patient_stock(f"stock, bidirectional, TTL {STOCK_TTL_S} s", decoder_kv_blocks_ttl=STOCK_TTL_S),
    ours("kvturn"),
)
BLOCKS = 24
TOKENS = 500
CONVERSATIONS = 10


def measure_pressure(version: str) -> Table:
    """Measures every set-up; minutes, most of them starting engines and waiting for stock."""
    rows = []
    for setup in SETUPS:
        with setup.stack(version, ("--num-gpu-blocks-override", str(BLOCKS))) as stack:
            hold_turn(stack, "warm", 40)
            seconds = []
            for index in range(CONVERSATIONS):
                began_s = time.monotonic()
                hold_turn(stack, f"turn-{index}", TOKENS)
                seconds.append(time.monotonic() - began_s)
        rows.append(
            (
                setup.name,
                f"{sum(seconds):.1f}",
                f"{sorted(seconds)[len(seconds) // 2]:.2f}",
                f"{max(seconds):.2f}",
            )
        )
        print(rows[-1], flush=True)
    return Table(
        f"Short memory, vLLM {version}",
        f"{CONVERSATIONS} conversations of one turn of about {TOKENS} tokens, one after the other, "
        f"on {BLOCKS} blocks of 128 tokens, in seconds. Stock's default TTL is 480 s. "
        "NIXL's progress thread may sleep in all of them.",
        ("connector", "all turns", "median turn", "longest turn"),
        rows,
    )
