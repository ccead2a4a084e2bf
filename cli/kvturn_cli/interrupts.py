"""Turns the signals that ask a command to stop into one exception, or into the end of a block.

The first one counts: what is stopped then stops within a bound, so nobody has to press Ctrl-C
twice, and a second Ctrl-C cannot cut the stopping short. Under `nohup` SIGHUP is none of them.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal."""


@contextlib.contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[None]:
    """Raises Interrupted in the block at the first such signal; later ones are ignored.

    `numbers` are the signals, all of STOP_SIGNALS unless some are named.
    """

    def interrupt() -> None:
        raise Interrupted

    with _at_first_signal(interrupt, numbers or STOP_SIGNALS):
        yield


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Cancels the block's task, on an event loop, at the first such signal.

    Later ones are ignored, after the block as well.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    with _at_first_signal(lambda: loop.call_soon_threadsafe(task.cancel), STOP_SIGNALS):
        yield


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block, on an event loop, at such a signal, as if it had come to its end."""
    task = asyncio.current_task()
    assert task is not None
    with cancelled_by_signals():
        try:
            yield
        except asyncio.CancelledError:
            task.uncancel()


@contextlib.contextmanager
def ctrl_c_as_exception() -> Iterator[None]:
    """Raises KeyboardInterrupt in the block at Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _at_first_signal(act: Callable[[], object], which: Sequence[signal.Signals]) -> Iterator[None]:
    """Acts at the first signal in the block; without one all is as before once it has ended."""
    numbers = [each for each in which if not _is_nohup(each)]
    came = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        act()

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
