"""`kvturn doctor` on real engines: in order, and set up wrongly in two ways."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
from lease_rig import LeaseProcess
from routers import FOUND, router

from kvturn.v1 import lease_pb2, lease_pb2_grpc
from kvturn_cli.engine import data_type, process_environment

if TYPE_CHECKING:
    from pathlib import Path

    from kvturn_cli.stack import Stack

DOCTOR_S = 240
REGISTERED_S = 30


def doctor(*flags: str) -> tuple[int, dict[str, Any]]:
    """Runs doctor. Returns its exit code and its report."""
    done = subprocess.run(
        [sys.executable, "-m", "kvturn_cli", "doctor", "--json", "--timeout=10", *flags],
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
        env=process_environment(),
    )
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def until_registered(stack: Stack) -> None:
    """Waits until all engines have a session: a busy machine may just have cost them one."""
    options = [("grpc.enable_http_proxy", 0)]
    deadline_s = time.monotonic() + REGISTERED_S
    with grpc.insecure_channel(stack.lease_address, options) as channel:
        service = lease_pb2_grpc.LeaseServiceStub(channel)
        while True:
            listed = service.ListEngines(lease_pb2.ListEnginesRequest(), timeout=REGISTERED_S)
            if len(listed.engines) == len(stack.config.engines):
                return
            assert time.monotonic() < deadline_s, listed
            time.sleep(0.2)


def of_severity(report: dict[str, Any], severity: str) -> dict[str, str]:
    """Returns what was seen, by check."""
    return {one["check"]: one["seen"] for one in report["findings"] if one["severity"] == severity}


def test_a_healthy_system_is_in_order_and_its_second_turn_reuses(stack: Stack) -> None:
    """Everything but the router's address is learned; engines tell how they were started."""
    until_registered(stack)
    code, report = doctor("--router", stack.router_url)
    seen = of_severity(report, "ok")
    assert not of_severity(report, "problem")
    assert code == 0
    first, second = report["turns"]
    assert first["verdict"] == "first_turn"
    assert second["verdict"] in FOUND, second
    assert second["reused_tokens"] + second["local_tokens"] > 0.5 * second["prompt_tokens"]
    assert first["ttft_ms"] > 0 < second["ttft_ms"]
    assert second["details_told"]
    assert f"{data_type()} on 3 engines" in seen["alike.dtype"]
    assert seen["transfer.backends"].startswith("equal: UCX: ")
    assert "decode-0" in seen["reach.side_channel"]
    assert "took an empty export in grpc" in seen["traces.collector"]
    assert {"versions.vllm", "versions.nixl", "versions.kvturn", "times.order"} < seen.keys()


def test_why_nothing_is_reused_is_found(stack: Stack, tmp_path: Path) -> None:
    """A router that computes all, and a lease service that no engine knows."""
    with router(stack, "computes-all", "--plan=recompute") as wrong:
        code, report = doctor("--router", wrong.url)
        problems = of_severity(report, "problem")
        assert code == 1
        assert "router.plan" in problems
        # On a busy machine engines lose their sessions now and then, and that is told, too.
        assert "anew" in ({**of_severity(report, "warning"), **problems})["turns.reuse"]
    code, report = asyncio.run(astray(stack, tmp_path))
    assert code == 1
    lost = [one for one in report["findings"] if one["check"] == "engines.session"]
    assert len(lost) == 3
    assert all("our connector is loaded and has no session" in one["seen"] for one in lost)


async def astray(stack: Stack, folder: Path) -> tuple[int, dict[str, Any]]:
    """Asks a lease service of its own in place of the one that the engines come to."""
    async with LeaseProcess(folder) as other:
        flags = ("--router", stack.router_url, "--lease", other.endpoint, "--no-turns")
        return await asyncio.to_thread(doctor, *flags)
