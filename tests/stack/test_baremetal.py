"""The scripts of deploy/baremetal on real engines without a GPU: start, measure, kill, clean up."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import CHECKOUT, MODEL, VERSIONS, own_cache, vllm_python

from kvturn_cli.ports import is_free, pick_free

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = CHECKOUT / "deploy" / "baremetal"
ENGINES_S = 600
SWEEP_S = 300


def run(name: str, *words: str, timeout_s: float = 60) -> str:
    """Runs a script to its end and returns what it says."""
    command = [str(FOLDER / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def writers_to(folder: Path) -> set[int]:
    """Returns the pids whose standard output or error lies in a folder."""
    found = set()
    for end in [*Path("/proc").glob("[0-9]*/fd/1"), *Path("/proc").glob("[0-9]*/fd/2")]:
        try:
            if end.resolve().parent == folder:
                found.add(int(end.parts[2]))
        except OSError:
            continue
    return found


@contextmanager
def pair(node: Path, run_dir: Path, side_ports: Mapping[str, int]) -> Iterator[None]:
    """Both services and both engines, started by the scripts; cleaned up whatever happens."""
    try:
        for role in ("lease", "router"):
            run("start.sh", "--file", str(node), f"ROLE={role}")
        starts = [
            subprocess.Popen(
                [FOLDER / "start.sh", "--file", node, f"ROLE={role}", f"SIDE_PORT={port}"]
            )
            for role, port in side_ports.items()
        ]
        assert [start.wait(ENGINES_S) for start in starts] == [0, 0]
        yield
    finally:
        run("cleanup.sh", f"RUN_DIR={run_dir}")


@pytest.mark.fault
def test_a_pair_is_started_measured_killed_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of two cells shows reuse with it on and none with it off.

    Then decode is killed: cleanup ends the engine core that it leaves, and all else.
    """
    monkeypatch.setenv("VLLM_CACHE_ROOT", own_cache(VERSIONS[-1])["VLLM_CACHE_ROOT"])
    run_dir, node, taken = tmp_path / "run", tmp_path / "node.env", set[int]()
    settings = {
        "P_IP": "127.0.0.1",
        "D_IP": "127.0.0.1",
        "DEVICE": "cpu",
        "MODEL": MODEL,
        **{name: pick_free(taken) for name in ("P_PORT", "D_PORT", "LEASE_PORT")},
        **{name: pick_free(taken) for name in ("ROUTER_PORT", "GRPC_PORT")},
        "VLLM_PYTHON": vllm_python(VERSIONS[-1]),
        "KVTURN": Path(sys.executable).parent / "kvturn",
        "MAX_MODEL_LEN": 2048,
        # Prefill would find the first prompt in its own cache: too little would be left to read.
        "PREFIX_CACHING": "off",
        "ROUTER_ARGS": "--plan pull",
        "RUN_DIR": run_dir,
    }
    side_ports = {role: pick_free(taken) for role in ("prefill", "decode")}
    node.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    with pair(node, run_dir, side_ports):
        words = ("CONTEXTS=300,700", "TURNS=2", "CONCURRENCY=1", "REPEATS=1", "ANSWER=8")
        run("sweep.sh", "--file", str(node), "LABEL=short", *words, timeout_s=SWEEP_S)
        with (run_dir / "sweep" / "short" / "table.csv").open() as file:
            table = list(csv.DictReader(file))
        assert [(row["context"], row["reuse"]) for row in table] == [
            *(("300", "on"), ("300", "off"), ("700", "on"), ("700", "off")),
        ]
        for row in table:
            reused = int(row["reused tokens"])
            assert reused > 0.8 * int(row["context"]) if row["reuse"] == "on" else reused == 0
            assert row["failed"] == "0"
            verdict = {"on": "reused 1", "off": "turned_off 1"}[row["reuse"]]
            assert row["verdicts"] == verdict
        leader = int((run_dir / "decode-0.pid").read_text())
        left = writers_to(run_dir / "logs")
        os.kill(leader, signal.SIGKILL)
    assert len(left) > 4, "an engine has a core beside its HTTP server"
    assert not writers_to(run_dir / "logs")
    assert not list(run_dir.glob("*.pid"))
    assert all(is_free(port) for port in taken)
