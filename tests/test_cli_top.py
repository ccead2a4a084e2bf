"""`kvturn top` in a terminal of its own, on a real lease service process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Self

import pytest
from etcd_server import until
from lease_guests import Guests, lease_service
from lease_rig import GUARD_S
from test_cli_operator import busy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
_sequence = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A terminal in which a command runs."""

    def __init__(
        self, *command: str, columns: int = 120, lines: int = 40, **variables: str
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, lines, tell=False)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.out = ""
        sizes = ("COLUMNS", "LINES")  # would count more than the terminal's own
        environment = {name: value for name, value in os.environ.items() if name not in sizes}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**environment, "TERM": "xterm-256color", **variables},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> None:
        self.out += os.read(self._master, 65_536).decode(errors="replace")

    def resize(self, columns: int, lines: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def until_shown(self, words: str) -> None:
        """Waits until the words are among what is written from now on."""
        seen = len(self.out)
        await until(lambda: words in _sequence.sub("", self.out[seen:]), GUARD_S)

    async def code(self) -> int:
        """Waits for the end of the command; returns its exit code."""
        await until(lambda: self.process.poll() is not None, GUARD_S)
        await asyncio.sleep(0)
        self._drain()
        assert self.process.returncode is not None
        return self.process.returncode

    def _drain(self) -> None:
        os.set_blocking(self._master, False)
        try:
            while True:
                self._read()
        except BlockingIOError:
            return

    def is_as_before(self) -> bool:
        """Tells whether the terminal's modes, screen and cursor are as they were."""
        modes = termios.tcgetattr(self._slave) == self.before
        screen = self.out.rindex(LEAVE) > self.out.rindex(ENTER)
        cursor = self.out.rindex(SHOW) > self.out.rindex(HIDE)
        return modes and screen and cursor


@pytest.fixture
async def guests(tmp_path: Path) -> AsyncIterator[Guests]:
    async with lease_service(tmp_path) as running:
        yield running


def top(guests: Guests, **size: int) -> Terminal:
    command = (sys.executable, "-m", "kvturn_cli", "top", f"--lease={guests.endpoint}")
    return Terminal(*command, "--interval=0.1", "--timeout=1", **size)


async def test_top_shows_engines_reuse_and_conversations_until_q(guests: Guests) -> None:
    """Then the terminal is as it was."""
    await busy(guests)
    async with top(guests) as terminal:
        await terminal.until_shown("trip-42")
        shown = _sequence.sub("", terminal.out)
        assert "asking" in shown
        assert "no engine has a session" not in shown
        assert "decode-0   decode   ████" in shown
        assert "of their prompts 90% read, 6% local, 4% computed" in shown
        assert "first_turn 3  reused 1" in shown
        terminal.press(b"xq")
        assert await terminal.code() == 0
        assert terminal.is_as_before()


@pytest.mark.parametrize("way", ["ctrl-c", "terminate"])
async def test_top_leaves_the_terminal_as_it_was_however_it_is_ended(
    guests: Guests, way: str
) -> None:
    """Ctrl-C is a key like q; so is a SIGTERM."""
    async with top(guests) as terminal:
        await terminal.until_shown("no engine has a session")
        if way == "ctrl-c":
            terminal.press(b"\x03")
        else:
            terminal.process.terminate()
        assert await terminal.code() == 0
        assert terminal.is_as_before()


async def test_top_outlives_a_lease_service_that_goes_and_comes_back(guests: Guests) -> None:
    """It says so, and how old is what it shows."""
    await guests.engine("decode-0")
    async with top(guests) as terminal:
        await terminal.until_shown("decode-0")
        guests.process.kill()
        await terminal.until_shown("old: no answer from the lease service")
        guests.process.launch()
        await until(guests.process.listens, GUARD_S)
        await guests.engine("decode-1")
        await terminal.until_shown("decode-1")
        assert "no answer" not in _sequence.sub("", terminal.out[terminal.out.rindex("decode-1") :])
        terminal.press(b"q")
        assert await terminal.code() == 0


async def test_top_follows_the_terminal_s_size(guests: Guests) -> None:
    """Narrower, it leaves columns out; no line is longer than the terminal."""
    await busy(guests)
    async with top(guests, columns=140, lines=40) as terminal:
        await terminal.until_shown("KV memory:")
        terminal.resize(60, 12)
        await terminal.until_shown("kvturn top")
        seen = len(terminal.out)
        await terminal.until_shown("decode-0")
        await terminal.until_shown("decode-0")
        narrow = _sequence.sub("", terminal.out[seen:].replace("\x1b[H", "\n"))
        assert "KV memory:" not in narrow
        assert max(map(len, narrow.splitlines())) <= 60
        terminal.press(b"q")
        assert await terminal.code() == 0


@pytest.mark.parametrize("variables", [{"COLUMNS": "0"}, {"LINES": "0"}, {"TERM": "dumb"}])
async def test_a_terminal_of_no_size_or_skill_is_shown_tables(
    guests: Guests, variables: dict[str, str]
) -> None:
    """Again and again with --watch: where nothing can be replaced, one after the other."""
    await busy(guests)
    command = (sys.executable, "-m", "kvturn_cli", "leases", f"--lease={guests.endpoint}")
    async with Terminal(*command, "--watch=0.1", **variables) as terminal:
        await terminal.until_shown("trip-42")
        await terminal.until_shown("trip-42")
        terminal.press(b"\x03")
        assert await terminal.code() == 0


async def test_top_needs_a_terminal_that_it_can_draw_on(guests: Guests) -> None:
    """On another it would show nothing and wait for a key."""
    command = (sys.executable, "-m", "kvturn_cli", "top", f"--lease={guests.endpoint}")
    async with Terminal(*command, TERM="dumb") as terminal:
        assert await terminal.code() == 2
        assert "kvturn top: needs a terminal, not TERM=dumb; " in terminal.out


async def test_revoking_an_engine_s_leases_asks_first(guests: Guests) -> None:
    """With a no nothing is revoked; with a yes all of them are."""
    await busy(guests)
    command = (sys.executable, "-m", "kvturn_cli", "revoke", f"--lease={guests.endpoint}")
    for answer, code, words in ((b"\n", 1, "nothing revoked"), (b"y\n", 0, "revoked decode-0.2.1")):
        async with Terminal(*command, "--engine=decode-0") as terminal:
            await terminal.until_shown("revoke 2 leases of decode-0? [y/N]")
            terminal.press(answer)
            assert await terminal.code() == code
            assert words in terminal.out
