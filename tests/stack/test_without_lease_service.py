"""The lease service dies and another one takes its place, on real engines.

Last of the tests of a shared stack, by the name of this file: the new lease service goes with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from conversation import Conversation
from prose import document
from test_life_of_a_turn import (
    LATE_S,
    chat,
    lease_pids,
    least,
    reuses,
    second_turn_without_reuse,
    step,
    timed_chat,
    wait_until,
)

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack


def test_dead_lease_service_is_survived(stack: Stack) -> None:
    """It is killed: decode frees at the bound by itself; a new one finds the engines again."""
    messages = [{"role": "user", "content": document("dead") + "\nWhat is the capital of France?"}]
    chat(stack, "dead", messages)
    assert Conversation(stack, "dead").resolve(1).lease_id
    without_s = second_turn_without_reuse(stack, "asks-nobody")
    for pid in lease_pids(stack):
        os.kill(pid, signal.SIGKILL)

    def lateness() -> float:
        _, told, dead_s = timed_chat(stack, "dead", messages)
        assert told["verdict"] == "lease_service_unreachable"
        print(f"first token after {dead_s:.3f} s, without reuse {without_s:.3f} s")
        return dead_s - without_s

    assert least(lateness, LATE_S) <= LATE_S
    wait_until(lambda: kv_usage_after_a_step(stack) < 0.01, "decode to free at the bound")
    host, _, port = stack.lease_address.rpartition(":")
    command = [sys.executable, "-m", "kvturn_cli", "lease", "--host", host, "--port", port]
    with subprocess.Popen(command) as lease:
        started_s = time.monotonic()
        try:
            wait_until(lambda: reuses(stack, "reborn"), "a turn that reuses")
            print(f"reuse was back {time.monotonic() - started_s:.1f} s after the start")
        finally:
            lease.terminate()


def kv_usage_after_a_step(stack: Stack) -> float:
    """Share of decode's KV memory in use, by vLLM's own count."""
    step(stack)
    with urllib.request.urlopen(f"{stack.decode_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(x for x in lines if x.startswith("vllm:kv_cache_usage_perc{")).split()[-1])
