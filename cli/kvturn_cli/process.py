"""One process of a stack: started on a leash, logged to a file, stopped within a bound."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

LOG_TAIL_BYTES = 16_384
SIGNALLED = 128
"""What is added to the number of a signal that ended a command, as shells do."""


@dataclass(frozen=True)
class ProcessId:
    """Names a process for ever: the kernel gives a pid again, but not with the same start time."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Returns the identity of a running process, None if there is none of that pid."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def is_running(self) -> bool:
        """Tells whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Sends a signal, to this very process or to none."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; tells whether it came."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_running():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True


class LeashedProcess:
    """A command on a leash (leash.py): it ends when asked, or with this process at the latest."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float
    ) -> None:
        """`name` is for people; `grace_s` is what the command gets between SIGTERM and SIGKILL."""
        self.name = name
        self.log = log
        self.command = tuple(command)
        self.grace_s = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        leash = [sys.executable, "-m", "kvturn_cli.leash", str(grace_s), *command]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                leash,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self.id = ProcessId.of(self._process.pid)

    def status(self) -> int | None:
        """Returns the command's exit status, 128 + signal if one ended it; None while it runs."""
        return self._process.poll()

    def ending(self) -> str:
        """Returns how the command ended, in words; "" while it runs."""
        status = self.status()
        if status is None:
            return ""
        number = status - SIGNALLED
        name = signal.Signals(number).name if number in set(signal.Signals) else ""
        hint = "; out of memory?" if number == signal.SIGKILL else ""
        return f"ended with status {status}" + (f" (killed by {name}{hint})" if name else "")

    def terminate(self) -> None:
        """Asks the command to stop; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_stopped(self) -> None:
        """Waits until the command and all that it started are gone; call terminate() before."""
        try:
            self._process.wait(self.grace_s + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()  # The command itself then dies by its parent-death signal.
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def last_line(self) -> str:
        """Returns the last line that tells something in the log: the last error, or the last."""
        lines = [line for line in self.tail() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()

    def tail(self, lines: int = 40) -> list[str]:
        """Returns the last lines of the log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
        return []
