"""Turns the signals that ask a command to stop into one exception."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises Interrupted in the block at the first such signal; later ones are ignored.

    What is stopped then stops within a bound, so nobody has to press Ctrl-C twice, and a second
    Ctrl-C cannot cut the stopping short.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
