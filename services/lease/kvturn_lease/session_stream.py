"""The sending half of one engine's session stream: a bounded queue and why it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvturn_lease.errors import LeaseServiceError, StreamSlow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvturn.v1 import lease_pb2


class SessionStream:
    """Messages on their way to one engine, in order.

    An engine that does not read is not waited for: once the queue is full its stream is ended,
    and what was queued is dropped; it registers again and learns all it missed.
    """

    def __init__(self, queued_max: int) -> None:
        assert queued_max > 0
        self._queued_max = queued_max
        self._queue: deque[lease_pb2.EngineSessionResponse] = deque()
        self._wake = asyncio.Event()
        self._error: LeaseServiceError | None = None

    def send(self, message: lease_pb2.EngineSessionResponse) -> None:
        """Queues a message; never waits."""
        if self._error is not None:
            return
        if len(self._queue) >= self._queued_max:
            self.end(StreamSlow(self._queued_max))
            return
        self._queue.append(message)
        self._wake.set()

    def end(self, error: LeaseServiceError) -> None:
        """Makes write_all() raise `error` and drop what is queued; the first error stays."""
        if self._error is None:
            self._error = error
            self._queue.clear()
            self._wake.set()

    async def write_all(
        self, write: Callable[[lease_pb2.EngineSessionResponse], Awaitable[None]]
    ) -> None:
        """Hands queued messages to `write`, one at a time, until end(); raises its error."""
        while True:
            while self._queue:
                await write(self._queue.popleft())
            if self._error is not None:
                raise self._error
            await self._wake.wait()
            self._wake.clear()
