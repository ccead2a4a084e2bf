"""Commands whose standard streams are closed, full, gone or poor: they end in order, in a line."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from lease_guests import lease_service

from kvturn.streams import EXIT_PIPE, announce, run_command

if TYPE_CHECKING:
    from pathlib import Path

GUARD_S = 120
KVTURN = (sys.executable, "-m", "kvturn_cli")
FULL = "/dev/full"


def run(*arguments: str, prefix: str = "", redirect: str = "") -> tuple[int, str]:
    """Runs `kvturn` under a shell's redirections; returns its code and what it says on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'{prefix} "$@" {redirect}', "bash", *KVTURN, *arguments],
        capture_output=True,
        timeout=GUARD_S,
        check=False,
        # Buffered as it is in use: what is full is found at the end, too.
        env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help"), ("router", "--help")])
def test_a_full_disk_is_told_in_a_line(arguments: tuple[str, ...]) -> None:
    """Whoever redirected the output would else take half of it for all."""
    code, said = run(*arguments, redirect=f"> {FULL}")
    assert code == 1
    assert said.endswith(": cannot write to stdout: No space left on device\n")
    assert said.count("\n") == 1


def test_a_reader_that_has_gone_ends_a_command_in_silence() -> None:
    """As with `| head`: nobody has to be told."""
    code, said = run("--help", prefix="set -o pipefail;", redirect="| true")
    assert (code, said) == (EXIT_PIPE, "")


def test_closed_streams_are_as_if_nobody_listened(tmp_path: Path) -> None:
    """Questions to stdin are answered by its end; what is opened takes no stream's number."""
    down = ("down", f"--run-dir={tmp_path}")
    assert run(*down, redirect=">&-") == (0, "")
    assert run(*down, redirect="<&- >&- 2>&-") == (0, "")
    code, said = run("revoke", "--engine=e", redirect="<&-")
    assert code == 2
    assert said.startswith("kvturn revoke: --engine needs --yes with --json, and where nobody can")


def test_a_stderr_that_takes_nothing_does_not_change_the_exit_code() -> None:
    """A wrong flag is one also where nobody can be told."""
    assert run("nonsense", redirect=f"2> {FULL}")[0] == 2


def test_names_that_stdout_s_encoding_lacks_are_spelt_out() -> None:
    """As escapes, so that they can still be told apart."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    before, sys.stdout = sys.stdout, stream
    try:
        assert run_command("kvturn", lambda: print("zürich 🚀") or 0) == 0  # type: ignore[func-returns-value]
    finally:
        sys.stdout = before
    assert raw.getvalue() == b"z\\xfcrich \\U0001f680\n"


async def test_a_table_is_shown_in_any_encoding(tmp_path: Path) -> None:
    """Names come from clients, and the terminal may be an old one."""
    async with lease_service(tmp_path) as guests:
        await guests.engine("décode")
        process = await asyncio.create_subprocess_exec(
            *KVTURN,
            "engines",
            f"--lease={guests.endpoint}",
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"d\\xe9code" in out


def test_a_service_serves_on_if_nobody_can_be_told_that_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its log has what matters; the line is for whoever waits for it."""

    def serve() -> int:
        announce("listening")
        return 7

    with open(FULL, "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command("kvturn router", serve) == 7


def test_whatever_a_command_does_with_errors_a_lost_output_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """What catches the faults of files must not take stdout's for one of theirs."""

    def tell() -> int:
        try:
            print("x" * 100_000)
        except Exception:
            return 7
        return 8

    with open(FULL, "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command("kvturn turns", tell) == 1
    assert capfd.readouterr().err == (
        "kvturn turns: cannot write to stdout: No space left on device\n"
    )
