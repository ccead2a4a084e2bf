"""The worker's limits on reads, on the vLLM code of each supported version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import VERSIONS, vllm_python

CHECKS = Path(__file__).parent / "in_engine" / "check_worker.py"


@pytest.mark.parametrize("version", VERSIONS)
def test_late_failed_and_foreign_reads_are_not_used(version: str) -> None:
    """Each check of in_engine/check_worker.py holds; they run where vLLM is."""
    done = subprocess.run(
        [str(vllm_python(version)), str(CHECKS)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = CHECKS.read_text().count("\ndef check_")
    assert done.stdout.count("ok check_") == wanted > 0
