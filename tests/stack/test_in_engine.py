"""The connector's halves and the router's requests on each supported vLLM, without an engine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from engines import VERSIONS, vllm_python

FOLDER = Path(__file__).parent / "in_engine"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("checks", ["check_worker.py", "check_schedulers.py", "check_requests.py"])
def test_every_check_holds_where_vllm_is(version: str, checks: str) -> None:
    """Each function check_* of the file is run by the Python of that vLLM environment."""
    file = FOLDER / checks
    done = subprocess.run(
        [str(vllm_python(version)), str(file)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok check_") == file.read_text().count("\ndef check_") > 0
