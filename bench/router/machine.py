"""Processes pinned to a CPU, with their CPU time and memory; CPUs kept from halting."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvturn_cli.leash import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

ROUTER_CPU, OTHER_CPU = 0, 1


class BenchError(Exception):
    """The benchmark cannot go on; the message is one line."""


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STOP_TIMEOUT_S = 10.0
# Of a process and of its ended children, in /proc/PID/stat after the name.
_CPU, _KERNEL = (11, 12, 13, 14), (12, 14)
_SPIN = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


class Program:
    """A process with all its descendants, all on one CPU. Its output goes to `log`."""

    def __init__(self, args: Sequence[str], cpu: int, log: Path) -> None:
        self.args = args
        self.log = log
        self._cpu = cpu
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        def prepare() -> None:
            die_with_parent()
            os.sched_setaffinity(0, {self._cpu})

        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.args,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        assert process is not None
        tree = self._tree()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
                if not any(Path(f"/proc/{pid}").exists() for pid in tree):
                    return

    @property
    def running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def cpu_s(self) -> float:
        """Returns the user and system time of the whole tree so far, ended children included."""
        return self._ticks(_CPU)

    def kernel_s(self) -> float:
        """Returns the system time alone."""
        return self._ticks(_KERNEL)

    def _ticks(self, fields: Sequence[int]) -> float:
        total = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                stat = _stat(pid)
                total += sum(int(stat[field]) for field in fields)
        return total * _TICK_S

    def rss_bytes(self) -> int:
        """Returns the resident memory of the whole tree."""
        pages = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _tree(self) -> list[int]:
        assert self._process is not None
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    pid = int(entry.name)
                    children.setdefault(int(_stat(pid)[1]), []).append(pid)
        found = [self._process.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


def _stat(pid: int) -> list[str]:
    # What follows the name, which may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keeps both CPUs from halting, so that a virtual machine's waking up is not measured."""
    with contextlib.ExitStack() as stack:
        for cpu in (ROUTER_CPU, OTHER_CPU):
            stack.enter_context(Program([sys.executable, "-c", _SPIN], cpu, Path(os.devnull)))
        time.sleep(0.3)
        yield


class Foreign:
    """The share of a CPU that others took since this was made; rough, for it is sampled."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()

    def share(self, own_s: float) -> float:
        """Returns it, both CPUs together, `own_s` being what the measurement itself took."""
        took_s = time.monotonic() - self._began_s
        return max(0.0, (_busy_s() - self._busy_s - own_s) / took_s)


def _busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) * _TICK_S
