"""Real etcd servers for tests: one, or a cluster of three, on free ports of 127.0.0.1.

    async with EtcdServer(tmp_path) as etcd:
        ... etcd.endpoint ...

Each dies with the test process, however that ends. A server can be killed (-9), started again on
the same data or on none, frozen and resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Self

from kvturn_cli.etcd import find_etcd
from kvturn_cli.leash import die_with_parent
from kvturn_cli.ports import HOST, pick_free

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from types import TracebackType

START_TIMEOUT_S = 120.0
_taken: set[int] = set()


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Returns once the condition holds; fails after `timeout_s`. It may be a coroutine function."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        outcome = condition()
        if isinstance(outcome, asyncio.Future) or asyncio.iscoroutine(outcome):
            outcome = await outcome
        if outcome:
            return
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        await asyncio.sleep(0.02)


def etcd_binary() -> Path:
    """Returns the etcd to test with."""
    binary = find_etcd()
    assert binary is not None, "no etcd; run make setup-fast"
    return binary


class EtcdServer:
    """One etcd process."""

    def __init__(self, folder: Path, *args: str, name: str = "e0", scheme: str = "http") -> None:
        """`args` are more flags; `scheme` "https" needs the flags that name certificates."""
        self.name = name
        self.data_dir = folder / name
        self.log = folder / f"{name}.log"
        self.port, self.peer_port, self.metrics_port = (pick_free(_taken) for _ in range(3))
        self.endpoint = f"{HOST}:{self.port}"
        self.peer_url = f"http://{HOST}:{self.peer_port}"
        self.cluster = f"{name}={self.peer_url}"
        self._scheme = scheme
        self._args = args
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    async def start(self) -> None:
        """Starts it, again on the same data if there is some, and waits until it is healthy."""
        self.launch()
        await until(self.is_healthy, START_TIMEOUT_S)

    def launch(self) -> None:
        """Starts it and does not wait."""
        assert self._process is None
        client = f"{self._scheme}://{self.endpoint}"
        command = [
            str(etcd_binary()),
            *("--name", self.name, "--data-dir", str(self.data_dir)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", self.peer_url),
            *("--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", self.cluster, "--initial-cluster-token", "kvturn-test"),
            *("--listen-metrics-urls", f"http://{HOST}:{self.metrics_port}"),
            # Smaller than the defaults, for short tests; leases of 1 s become possible.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--unsafe-no-fsync", "--log-level", "error"),
            *self._args,
        ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )

    async def is_healthy(self) -> bool:
        """Tells whether it takes requests."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2_000:]
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                return b'"health":"true"' in await self.get("/health")
        return False

    async def get(self, path: str) -> bytes:
        """Returns what a GET on its port for health and metrics answers, head included."""
        reader, writer = await asyncio.open_connection(HOST, self.metrics_port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return await reader.read()
        finally:
            writer.close()

    async def ctl(self, *args: str, ok: bool = True) -> str:
        """Runs etcdctl on it and returns what it printed; fails if it does, unless not `ok`."""
        process = await asyncio.create_subprocess_exec(
            str(etcd_binary().with_name("etcdctl")),
            "--endpoints",
            f"{self._scheme}://{self.endpoint}",
            *args,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "ETCDCTL_API": "3"},
        )
        printed, error = await process.communicate()
        assert process.returncode == 0 or not ok, error.decode()
        return printed.decode()

    async def fill(self) -> None:
        """Puts keys that begin with "filler" until it raises its alarm for want of space.

        Start it with a small --quota-backend-bytes.
        """
        for number in range(1_000):
            if "NOSPACE" in await self.ctl("alarm", "list"):
                return
            await self.ctl("put", f"filler{number}", "x" * 100_000, ok=False)
        raise AssertionError("etcd takes all that it gets")

    def kill(self) -> None:
        """Kills it with -9; nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Removes all that it stored; it must not run."""
        assert self._process is None
        shutil.rmtree(self.data_dir)

    def freeze(self) -> None:
        """Stops it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a frozen one go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class EtcdCluster:
    """Three members."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.members = [EtcdServer(folder, *args, name=f"e{index}") for index in range(3)]
        cluster = ",".join(member.cluster for member in self.members)
        for member in self.members:
            member.cluster = cluster
        self.endpoints = tuple(member.endpoint for member in self.members)

    async def __aenter__(self) -> Self:
        for member in self.members:
            member.launch()
        waiting: list[Awaitable[None]] = [
            until(member.is_healthy, START_TIMEOUT_S) for member in self.members
        ]
        await asyncio.gather(*waiting)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.kill()
