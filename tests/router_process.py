"""A router in a process of its own, as operators start it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

from metrics_page import MetricsPage
from router_harness import Client
from stub_engine import GUARD_S

_PASSED_ON = ("PATH", "HOME", "PYTHONPATH")


class Process:
    """A router in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.grpc_port = 0

    async def until_listening(self) -> str:
        """Waits for the line that says so; returns it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(GUARD_S):
            line = (await self.process.stdout.readline()).decode()
        self.port = int(line.split("http://127.0.0.1:")[1].split(",")[0])
        if ", grpc " in line:
            self.grpc_port = int(line.rpartition(":")[2])
        return line

    async def client(self) -> Client:
        """Returns a new connection."""
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def until_ready(self) -> None:
        """Waits until it says that it can serve turns."""
        async with asyncio.timeout(GUARD_S):
            while True:
                client = await self.client()
                await client.send("GET", "/ready")
                if (await client.answer()).status == 200:
                    return
                client.close()

    async def until_session(self) -> None:
        """Waits until it says that the lease service answers on its session.

        It is ready without one, too: on a busy machine its first attempt may take too long.
        """
        up = 0.0
        async with asyncio.timeout(GUARD_S):
            while not up:
                client = await self.client()
                await client.send("GET", "/metrics")
                page = MetricsPage((await client.answer()).body.decode())
                up = page.value("kvturn_router_lease_session_up")
                client.close()

    async def end(self) -> tuple[int, str]:
        """Waits for the exit; returns its code and what was written to stderr."""
        assert self.process.stderr is not None
        async with asyncio.timeout(GUARD_S):
            errors = (await self.process.stderr.read()).decode()
            return await self.process.wait(), errors


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Process]:
    """Runs a router until the block ends; then it is killed if it still runs."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvturn_router",
        *flags,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(started)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
