"""Signals that ask a command to stop, at every stage: an end in order, without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from lease_guests import lease_service

from kvturn_cli.interrupts import Interrupted, ended_by_signals, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GUARD_S = 120
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SLOW_IMPORT = """\
import os, signal, sys, importlib.abc
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Begins with the usual handlers, also under nohup and in the background of a script.

    Gives the signals back their own, which commands keep from them as they end.
    """
    usual = {INT: signal.default_int_handler, TERM: signal.SIG_DFL, HUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "command",
    [
        ("kvturn_cli", "leases"),
        ("kvturn_cli", "router"),
        ("kvturn_router",),
        ("kvturn_lease",),
    ],
)
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """That is most of the first second."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=GUARD_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-INT, b"")  # to a shell that is 130


@pytest.mark.parametrize("number", [INT, TERM, HUP])
async def test_a_watch_ends_in_order_however_often_it_is_told(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The second signal comes while connections are closed."""
    async with lease_service(tmp_path) as guests, asyncio.timeout(GUARD_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvturn_cli", "leases", f"--lease={guests.endpoint}"),
            *("--watch=0.05", "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(number)
        while process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            await asyncio.sleep(0.005)
        _, said = await process.communicate()
    assert (process.returncode, said) == (0, b"")


def test_the_second_signal_cannot_cut_the_stopping_short() -> None:
    stopped = False
    try:
        with interruptible():
            signal.raise_signal(INT)
    except Interrupted:
        signal.raise_signal(INT)
        signal.raise_signal(TERM)
        stopped = True
    assert stopped


def test_under_nohup_a_terminal_that_goes_is_no_reason_to_stop() -> None:
    signal.signal(HUP, signal.SIG_IGN)
    with interruptible():
        signal.raise_signal(HUP)
    assert signal.getsignal(HUP) is signal.SIG_IGN


async def test_a_block_that_no_signal_ended_leaves_the_handlers_as_they_were() -> None:
    before = signal.getsignal(TERM)
    with ended_by_signals():
        assert signal.getsignal(TERM) is not before
    assert signal.getsignal(TERM) is before
