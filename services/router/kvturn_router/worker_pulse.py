"""How a router with several workers finds one that no longer answers.

A worker that is stopped, or whose event loop hangs, keeps its share of the ports' connections and
serves none of them. So each worker's loop writes a byte to its standard output, a pipe to the
parent, once a second; the parent takes one from which nothing came for STILL_S as good as dead.
"""

import asyncio
import contextlib
import os
from typing import Final

STILL_S: Final = 10.0
"""How long a worker may give no sign of life."""

_BEAT_S: Final = 1.0
_STDOUT: Final = 1
_READ_BYTES: Final = 4096


async def beat() -> None:
    """Gives signs of life, as a worker, until it is cancelled."""
    os.set_blocking(_STDOUT, False)
    while True:
        # A parent that does not read is no reason to wait; one that is gone ends us otherwise.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(_STDOUT, b".")
        await asyncio.sleep(_BEAT_S)


async def until_still(pipe: asyncio.StreamReader, still_s: float) -> bool:
    """Waits, as the parent, until no sign of life came for `still_s`; False if the pipe ended."""
    waits = (still_s, 2 * _BEAT_S)
    while True:
        for wait_s in waits:
            # The second time because both processes may have stood still, and this one woke first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    if not await pipe.read(_READ_BYTES):
                        return False
                break
        else:
            return True
