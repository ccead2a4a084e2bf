"""The connector's halves and the router's requests on each supported vLLM, without an engine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import VERSIONS, vllm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "in_engine"
CHECKS = ("check_worker.py", "check_schedulers.py", "check_requests.py")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def printed() -> Iterator[dict[str, str]]:
    """What the checks printed on each version. The versions run side by side."""
    running = {
        version: subprocess.Popen(
            [str(vllm_python(version)), str(FOLDER), *CHECKS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for version in VERSIONS
    }
    try:
        found = {}
        for version, process in running.items():
            found[version], _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, found[version][-3000:]
        yield found
    finally:
        for process in running.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("checks", CHECKS)
def test_every_check_holds_where_vllm_is(
    printed: dict[str, str], version: str, checks: str
) -> None:
    """Each function check_* of the file is run by the Python of that vLLM environment."""
    _, _, text = printed[version].partition(f"file {checks}\n")
    text, _, _ = text.partition("\nfile check_")
    there = (FOLDER / checks).read_text().count("\ndef check_")
    assert text.count("ok check_") == there > 0, text[-3000:]
