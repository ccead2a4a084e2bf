"""Turns the signals that ask a command to stop into one exception."""

import asyncio
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


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block, on an event loop, at such a signal, as if it had come to its end."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        task.uncancel()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
