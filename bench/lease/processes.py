"""Server processes under measurement: pinned to one core, with their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvturn_cli.leash import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_ANNOUNCEMENT = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


class BenchError(Exception):
    """The benchmark cannot go on; the message is one line."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores what runs on."""

    server: frozenset[int]
    generator: frozenset[int]

    @classmethod
    def choose(cls) -> Cores:
        """Takes one core for servers and another for the load generator, where there are two."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            return cls(frozenset(usable), frozenset(usable))
        return cls(frozenset(usable[:1]), frozenset(usable[1:2]))

    @property
    def apart(self) -> bool:
        """True if servers do not share a core with the generator."""
        return self.server != self.generator


@dataclass(frozen=True, slots=True)
class Usage:
    """What all threads of a process had of their core."""

    cpu_ns: int
    waited_ns: int
    """Time in which they could run and something else did."""

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Reads it for a process that runs."""
        cpu_ns = waited_ns = 0
        for entry in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                fields = (entry / "schedstat").read_text().split()
                cpu_ns += int(fields[0])
                waited_ns += int(fields[1])
        return cls(cpu_ns, waited_ns)

    def since(self, earlier: Usage) -> Usage:
        """Returns the difference."""
        return Usage(self.cpu_ns - earlier.cpu_ns, self.waited_ns - earlier.waited_ns)


class ServerProcess:
    """A server that says on stdout where it listens on 127.0.0.1."""

    def __init__(self, name: str, args: Sequence[str], cores: frozenset[int]) -> None:
        """`args` follow the Python interpreter."""
        self.name = name
        self.port = 0
        self._args = args
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        def prepare() -> None:
            die_with_parent()
            os.sched_setaffinity(0, self._cores)

        self._process = subprocess.Popen(
            [sys.executable, *self._args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select() sees every line that was not read yet
            preexec_fn=prepare,
        )
        try:
            self.port = self._read_port()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def usage(self) -> Usage:
        """Returns what it had of its core."""
        return Usage.of(self._pid)

    def rss_bytes(self) -> int:
        """Returns its resident memory."""
        return self._status_bytes("VmRSS")

    def peak_rss_bytes(self) -> int:
        """Returns the most resident memory it ever had."""
        return self._status_bytes("VmHWM")

    def _status_bytes(self, name: str) -> int:
        found = re.search(
            rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{self._pid}/status").read_text(), re.MULTILINE
        )
        assert found is not None
        return int(found[1]) * 1024

    def _read_port(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                break
            line = self._process.stdout.readline().decode()
            found = _ANNOUNCEMENT.search(line)
            if found is not None:
                return int(found[1])
            if not line:
                raise BenchError(f"{self.name} ended at start: exit {self._process.wait()}")
        raise BenchError(f"{self.name} did not listen within {_START_TIMEOUT_S:g} s")

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
