"""Keeps a command, and everything that it starts, on a leash.

    python -m kvturn_cli.leash GRACE_S COMMAND...      (stdin: a pipe that the holder keeps open)

When the holder is gone in whatever way, kill -9 included, its end of the pipe closes; then, or on
SIGTERM, the command is asked to stop and killed after GRACE_S seconds. Processes that the command
leaves behind are killed too: as their "child subreaper" the leash inherits them, so none can slip
away by a double fork. Exits with the command's status, 128 + signal if a signal ended it.

Only the standard library is imported, because one leash runs beside each process of a stack.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS_MAX = 200  # 10 s at 50 ms; a process in an uninterruptible sleep may outlast it.


def main(argv: list[str]) -> int:
    """Runs the command until it ends, the holder goes, or SIGTERM."""
    grace_s = float(argv[0])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        # A group of its own: a terminal's Ctrl-C goes to the holder alone, which stops in order.
        command = subprocess.Popen(
            argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent
        )
    except OSError as error:
        print(f"cannot run {argv[1]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    wait_for_end(command, wake_read, grace_s)
    kill_descendants()
    status = command.wait()
    reap()
    return status if status >= 0 else 128 - status


def die_with_parent() -> None:
    """Lets the kernel kill the command should the leash itself be killed with -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_for_end(command: subprocess.Popen[bytes], wake: int, grace_s: float) -> None:
    """Returns when the command has ended or its grace is over."""
    holder = sys.stdin.fileno()
    watched = [wake, holder]
    deadline_s: float | None = None
    while command.poll() is None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        ready, _, _ = select.select(watched, [], [], left_s)
        stop = False
        if wake in ready:
            numbers = os.read(wake, 256)
            stop = any(number != signal.SIGCHLD for number in numbers)
        if holder in ready and not os.read(holder, 256):
            watched.remove(holder)
            stop = True
        if stop and deadline_s is None:
            deadline_s = time.monotonic() + grace_s
            command.terminate()


def kill_descendants() -> None:
    """Kills every process below this one, until none is left."""
    for _ in range(KILL_ROUNDS_MAX):
        found = descendants(os.getpid())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def reap() -> None:
    """Takes the status of what was killed, so that no zombie is left for an init that is slow."""
    for _ in range(KILL_ROUNDS_MAX):
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


def descendants(root: int) -> list[int]:
    """Returns the live processes below `root`, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    below: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        below.extend(frontier)
    return below


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
