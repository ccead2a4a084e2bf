"""The benchmark of the lease service runs through, and its own checks of the counts hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.lease", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def first_rows(text: str) -> list[list[str]]:
    """Returns the cells of a text's first table, without its head."""
    section = re.split("^## ", text, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[1:]]


def first_cells(text: str) -> list[str]:
    """Returns the first cell of each of its rows."""
    return [row[0] for row in first_rows(text)]


def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    """A few calls of each kind: no refusal, no lease lost or left over, and every row is there.

    The benchmark itself ends with an error unless each read was granted and the service holds as
    many leases as it should after each setting.
    """
    out = tmp_path / "RESULTS.md"
    done = bench("--fast", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    written = out.read_text()
    assert written.startswith("# What the lease service costs\n")
    assert str(ROOT) not in written
    core = first_cells(written.partition("## The core alone, in process")[2])
    assert core == [
        "grant",
        "resolve",
        "resolve again",
        "keep_alive",
        "begin_read",
        "end_read",
        "heartbeat",
        "expire",
    ]
    operations = ["Grant", "ResolveConversation", "BeginRead", "EndRead", "heartbeat"]
    memory_store, both_stores = written.split("## Operations over gRPC")[1:]
    assert first_cells(memory_store) == ["echo", *operations]
    assert first_cells(both_stores) == ["echo", *(name for name in operations for _ in range(2))]
    reads = written.partition("## BeginRead at 1,000 a second")[2]
    assert first_cells(reads) == ["echo of the same size", "BeginRead"]
    assert first_cells(written.partition("## Memory of the service process")[2]) == ["100", "100"]
    transactions = written.partition("## BeginRead beside a fenced transaction")[2]
    assert first_cells(transactions) == [
        "echo of the same size",
        "BeginRead, memory store",
        "BeginRead, etcd store",
        "fenced transaction",
    ]
    writes = first_rows(written.partition("## What the store writes to etcd")[2])
    assert [row[0].split()[:2] for row in writes] == [
        ["100", "leases"],
        [writes[1][0].split()[0], "heartbeats"],
        ["etcd", "leases"],
    ]
    assert writes[1][1] == "0"  # heartbeats add no revisions


def test_what_is_not_known_is_refused_by_name() -> None:
    done = bench("--only", "speed")
    assert done.returncode == 2
    assert "--only must name some of" in done.stderr
    assert "speed" in done.stderr
