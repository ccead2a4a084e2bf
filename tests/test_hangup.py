"""SIGHUP: the terminal of a service is gone, or an operator wants files to be read again."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest
from stub_engine import GUARD_S
from test_workers import workers

_SERVICES = {
    "router": [
        "kvturn_router",
        "--port=0",
        "--no-grpc",
        "--prefill=http://127.0.0.1:1",
        "--decode=http://127.0.0.1:2",
    ],
    "lease": ["kvturn_lease", "--port=0"],
}


def start(service: str, terminal: int | None, ignore: bool = False) -> "subprocess.Popen[bytes]":
    """Starts a service in a session of its own, and returns once it listens.

    `terminal` is a file of the terminal that the session gets, None for none.
    """

    def begin() -> None:
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignore else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", *_SERVICES[service]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=() if terminal is None else (terminal,),
        start_new_session=True,
        preexec_fn=begin,
    )
    assert process.stdout is not None
    assert b"listening" in process.stdout.readline()
    return process


def ended(process: "subprocess.Popen[bytes]", do: Callable[[], object]) -> int:
    """Does what should end a service; returns how it ended."""
    try:
        do()
        return process.wait(GUARD_S)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_whose_terminal_is_gone_ends_in_order(service):
    """The window is closed, or the connection to the machine is lost."""
    controller, terminal = pty.openpty()
    process = start(service, terminal)
    os.close(terminal)
    assert ended(process, lambda: os.close(controller)) == 0


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_without_a_terminal_is_not_ended_by_sighup(service):
    """Nor a second time; SIGTERM ends it in order."""
    process = start(service, None)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert ended(process, process.terminate) == 0


def test_under_nohup_the_terminal_may_go():
    """What ignores SIGHUP from the start goes on doing so."""
    controller, terminal = pty.openpty()
    process = start("router", terminal, ignore=True)
    os.close(terminal)
    os.close(controller)
    process.send_signal(signal.SIGHUP)
    assert ended(process, process.terminate) == 0


async def test_workers_serve_on_after_sighup():
    """Parent and workers get it: the same workers serve all turns that follow."""
    async with workers(2) as fleet:
        pids = fleet.pids
        for pid in (fleet.router.process.pid, *pids):
            os.kill(pid, signal.SIGHUP)
        await fleet.serving(2)
        assert fleet.pids == pids
        fleet.router.process.terminate()
        code, errors = await fleet.router.end()
        assert (code, "another takes its place" in errors) == (0, False)
