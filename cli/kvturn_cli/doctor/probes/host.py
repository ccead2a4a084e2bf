"""Looks at the machine that doctor runs on."""

import asyncio
import contextlib

from kvturn_cli.doctor.facts import HostFacts
from kvturn_connector.settings import machine, network

FI_INFO = ("fi_info", "-p", "efa")


def this_host(*, from_here: bool) -> HostFacts:
    """Returns which machine and network this is."""
    return HostFacts(machine(), network(), from_here=from_here)


async def efa_provider(timeout_s: float) -> tuple[bool | None, str]:
    """Tells whether libfabric has an EFA provider here, None if nobody can say; and why not."""
    try:
        process = await asyncio.create_subprocess_exec(
            *FI_INFO,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        return None, f"{FI_INFO[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return None, f"{' '.join(FI_INFO)} did not end within {timeout_s:g} s"
    if process.returncode == 0 and b"provider: efa" in output:
        return True, ""
    lines = output.decode(errors="replace").strip().splitlines()
    return False, f"{' '.join(FI_INFO)}: {lines[0] if lines else 'no output'}"[:200]
