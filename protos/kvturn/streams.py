"""The standard streams of a command: closed, full, or without the letters of a name.

What is written and does not arrive ends a command in order: in silence where the reader of a pipe
has gone, as with `| head`, else with one line. What cannot be said on stderr changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED = 1
EXIT_PIPE = 141
"""What shells make of SIGPIPE."""


class OutputEnd(SystemExit):
    """Stdout takes nothing more. Not an error that anything but `run_command` should handle."""

    def __init__(self, error: OSError) -> None:
        broken = error.errno == errno.EPIPE
        super().__init__(EXIT_PIPE if broken else EXIT_FAILED)
        self.problem = "" if broken else error.strerror or str(error)
        """Why, "" if nobody reads any more."""


def run_command(prog: str, command: Callable[[], int]) -> int:
    """Runs a command; returns its exit code, or that of a stdout that cannot be written."""
    _fill_gaps()
    out, errors = sys.stdout, sys.stderr
    _spell_out(out)
    told = sys.stdout = cast("TextIO", _Output(out))
    sys.stderr = cast("TextIO", _Errors(errors))
    try:
        try:
            return command()
        finally:
            told.flush()
    except OutputEnd as end:
        if end.problem:
            print(f"{prog}: cannot write to stdout: {end.problem}", file=sys.stderr)
        return cast("int", end.code)
    finally:
        sys.stdout, sys.stderr = out, errors


def announce(line: str) -> None:
    """Prints a line of a service, which serves on if nobody can be told."""
    with contextlib.suppress(OutputEnd):
        print(line, flush=True)


def _fill_gaps() -> None:
    """Opens /dev/null for each standard stream that is closed.

    What is opened later, a connection or a log, would else take its number, and the messages of
    libraries that write to it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _spell_out(stream: TextIO) -> None:
    """Has what a stream's encoding lacks be written as escapes."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and stream.errors == "strict":
        reconfigure(errors="backslashreplace")


def _drop_rest(stream: TextIO) -> None:
    """Sends what a stream still takes nowhere.

    What waits in buffers would else fail again at the end of the process.
    """
    with contextlib.suppress(OSError, ValueError):  # one of a test has no number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class _Output:
    """A stdout that ends the command once it takes nothing more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._end(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._end(error) from None

    def _end(self, error: OSError) -> OutputEnd:
        _drop_rest(self._stream)
        return OutputEnd(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Errors:
    """A stderr that drops what it cannot take."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            _drop_rest(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _drop_rest(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
