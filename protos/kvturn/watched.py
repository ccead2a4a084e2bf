"""What files say, read again when they change.

Keys and certificates are rotated by replacing their files. Nobody is told of that: whoever uses
what a file says looks, at most twice a second, whether it is still the file that was read. One
that was written just now may not be written whole: it is read at the next look, if it is the same
then. A new file that cannot be used changes nothing but one line in the log.
"""

from __future__ import annotations

import logging
import stat
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from kvturn.spelling import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

logger = logging.getLogger("kvturn.files")

T = TypeVar("T")

LOOK_INTERVAL_S = 0.5
"""Least time between two looks at the files, and how old one must be to have been written whole."""

_Signature = tuple[tuple[int, int, int] | None, ...]


class FileFault(Exception):
    """A file that cannot be used. The message names the setting, the file and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Watched(Generic[T]):
    """A value that is made from files. Safe to use from several threads."""

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[], T],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` makes the value; it raises FileFault, here and at once if it cannot."""
        self._files = tuple(files)
        self._read = read
        self._clock_s = clock_s
        # Before reading: what changes meanwhile is found at the next look.
        self._seen = self._signature()
        self._changing: _Signature | None = None
        self._look_at_s = clock_s() + LOOK_INTERVAL_S
        self._value = read()

    @property
    def value(self) -> T:
        """The value, as of a second ago at the latest."""
        now_s = self._clock_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_INTERVAL_S
            self._look()
        return self._value

    def _look(self) -> None:
        seen = self._signature()
        if seen == self._seen:
            self._changing = None
            return
        if seen != self._changing and _is_young(seen):
            self._changing = seen
            return
        self._seen, self._changing = seen, None
        try:
            self._value = self._read()
        except (FileFault, OSError) as fault:  # a file may go while it is read
            logger.error("%s; what was read before stays in force", fault)
        else:
            logger.info("read again: %s", ", ".join(map(str, self._files)))

    def _signature(self) -> _Signature:
        return tuple(map(_signature, self._files))


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_young(signature: _Signature) -> bool:
    """Tells whether a file was written just now, or its time says nothing."""
    now_ns = time.time_ns()
    return any(one is not None and now_ns - one[0] < LOOK_INTERVAL_S * 1e9 for one in signature)


def read_file(setting: str, file: Path) -> bytes:
    """Returns a file's content. Raises FileFault, also for a pipe.

    Nobody may ever write to a pipe, and what it gave once is not there to be read again.
    """
    try:
        if stat.S_ISFIFO(file.stat().st_mode):
            raise FileFault(f"{setting} {file}: is a pipe; give a file")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileFault(f"{setting} {file}: cannot be read: {reason}") from None


def warn_of_open_secrets(files: Iterable[Path]) -> None:
    """Logs a line for each file of secrets that every user of the machine can read."""
    for file in files:
        try:
            mode = file.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IROTH:
            logger.warning("%s can be read by every user of this machine: chmod o-r it", file)
