"""Time limits that pauses of the machine do not use up.

Time passes in short steps here: a pause, however long it is, makes one of them late.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

_STEP_S = 0.05


@contextlib.asynccontextmanager
async def within(span_s: float) -> AsyncIterator[None]:
    """As asyncio.timeout."""
    async with asyncio.timeout(None) as limit:

        async def run_out() -> None:
            for _ in range(round(span_s / _STEP_S)):
                await asyncio.sleep(_STEP_S)
            limit.reschedule(asyncio.get_running_loop().time())

        running = asyncio.create_task(run_out())
        try:
            yield
        finally:
            running.cancel()


def ends_within(span_s: float, call: Callable[[], object]) -> bool:
    """Tells whether a call that may block ends so soon; it goes on on a thread if not."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    for _ in range(round(span_s / _STEP_S)):
        thread.join(_STEP_S)
    return not thread.is_alive()
