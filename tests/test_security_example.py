"""The example of docs/security.md works as it is pasted."""

import asyncio
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from stub_engine import StubEngine

from kvturn_cli.ports import pick_free

GUARD_S = 120
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "security.md"


def blocks(language: str) -> list[str]:
    """Returns the document's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


async def printed(python: str, folder: Path) -> str:
    """Runs Python in a folder; returns what it prints."""
    asked = await asyncio.create_subprocess_exec(
        sys.executable, "-c", python, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    return (await asked.communicate())[0].decode().strip()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_the_example_is_served_over_tls_with_a_key_and_reuse(tmp_path: Path) -> None:
    """Shell first, then Python; only ports, the command's place and patience are not as written."""
    prefill, decode = await StubEngine("prefill").start(), await StubEngine("decode").start()
    taken: set[int] = set()
    lease, http, grpc = (pick_free(taken) for _ in range(3))
    changes = {
        "--retry 30": f"--retry {GUARD_S}",
        ".venv/bin/kvturn": f"{sys.executable} -m kvturn_cli",
        "http://127.0.0.1:8100": prefill.url,
        "http://127.0.0.1:8200": decode.url,
        "kvturn_cli router": f"kvturn_cli router --port {http} --grpc-port {grpc}",
        "--port 7600": f"--port {lease}",
        "localhost:7600": f"localhost:{lease}",
        "localhost:8000": f"localhost:{http}",
        "localhost:8001": f"localhost:{grpc}",
    }
    (shell,), (python,) = blocks("sh"), blocks("python")
    for written, meant in changes.items():
        shell, python = shell.replace(written, meant), python.replace(written, meant)
    held = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f"trap 'trap - TERM; kill 0' TERM\n{shell}\necho; echo done; wait",
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert held.stdout is not None
        async with asyncio.timeout(GUARD_S):
            said = (await held.stdout.readuntil(b"done\n")).decode()
        assert '"object"' in said
        async with asyncio.timeout(GUARD_S):
            # A router may be ready before its lease service is, and then says so.
            while (verdict := await printed(python, tmp_path)) == "lease_service_unreachable":
                pass
        assert verdict == "first_turn"
    finally:
        held.send_signal(signal.SIGTERM)
        await held.wait()
        await prefill.stop()
        await decode.stop()
