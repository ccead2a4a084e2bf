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
        timeout=120,
        check=False,
    )


def first_cells(document: str, title: str) -> list[str]:
    """Returns the first cell of each row of a section's table, without the head."""
    section = re.split("^## ", document.partition(f"## {title}")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines[1:]]


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
    core = first_cells(written, "The core alone, in process")
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
    operations = first_cells(written, "Operations over gRPC")
    assert operations == [
        "echo",
        "Grant",
        "ResolveConversation",
        "BeginRead",
        "EndRead",
        "heartbeat",
    ]
    questions = first_cells(written, "BeginRead at 1,000 a second")
    assert questions == ["echo of the same size", "BeginRead"]
    assert first_cells(written, "Memory of the service process") == ["100", "100"]


def test_what_is_not_known_is_refused_by_name() -> None:
    done = bench("--only", "speed")
    assert done.returncode == 2
    assert "--only must name some of" in done.stderr
    assert "speed" in done.stderr
