"""What the figures were measured on, and what else ran there meanwhile."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("grpcio", "protobuf", "uvloop")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def facts() -> str:
    """Returns one line about the machine and the software."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found[1] if found is not None else platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    priority = f", at niceness {os.nice(0)}" if os.nice(0) else ""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        priority = ", at real-time priority"
    return (
        f"{len(os.sched_getaffinity(0))} cores ({cpu}), {memory_gib:.0f} GiB, "
        f"Python {platform.python_version()}, {packages}{priority}"
    )


def load_average() -> str:
    """Returns the load averages of the last 1, 5 and 15 minutes."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


class Neighbours:
    """How many cores others kept busy, servers that this process started and ended excluded."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._before_s = self._others_s()

    def busy_cores(self) -> float:
        """Returns the mean since this was made."""
        return max(0.0, (self._others_s() - self._before_s) / (time.monotonic() - self._started_s))

    @staticmethod
    def _others_s() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        busy_s = (user + nice + system + irq + softirq + steal) / _TICKS_PER_SECOND
        own = [
            resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return busy_s - sum(usage.ru_utime + usage.ru_stime for usage in own)
