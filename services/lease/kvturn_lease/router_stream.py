"""The sending half of one router's session stream: what gathers goes out in one message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvturn.v1 import lease_pb2
from kvturn_lease import wire
from kvturn_lease.errors import StreamSlow
from kvturn_lease.routers import Begun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvturn_lease.errors import LeaseServiceError
    from kvturn_lease.routers import News


class RouterStream:
    """What one router is to be told next.

    A router that does not read is not waited for: once too much has gathered its stream is ended,
    and what was gathered is dropped; it opens a new session and learns all it missed.
    """

    def __init__(self, welcome: lease_pb2.RouterSessionResponse, items_max: int) -> None:
        """`welcome` is the first message, `items_max` how many turns and engines may gather."""
        assert items_max > 0
        self._items_max = items_max
        self._next = welcome
        self._engines: dict[str, lease_pb2.Engine | None] = {}
        """By engine id: what has changed since the last message; None if it is gone."""
        self._items = 0
        self._wake = asyncio.Event()
        self._wake.set()
        self._error: LeaseServiceError | None = None
        self._ended = asyncio.Event()

    def tell(self, news: News) -> None:
        """Takes an answer or a retention; never waits."""
        if self._takes_one_more():
            if isinstance(news, Begun):
                wire.write_begun(self._next, news)
            else:
                wire.write_retained(self._next, news)

    def engine(self, engine_id: str, engine: lease_pb2.Engine | None) -> None:
        """Takes an engine that came or changed, None if it is gone; never waits."""
        if engine_id in self._engines or self._takes_one_more():
            self._engines[engine_id] = engine

    def end(self, error: LeaseServiceError) -> None:
        """Makes until_ended() raise `error` and takes nothing more; the first error stays."""
        if self._error is None:
            self._error = error
            self._ended.set()

    async def until_ended(self) -> None:
        """Waits for end(), and raises its error."""
        await self._ended.wait()
        assert self._error is not None
        raise self._error

    async def write_all(
        self, write: Callable[[lease_pb2.RouterSessionResponse], Awaitable[None]]
    ) -> None:
        """Hands what has gathered to `write`, whenever `write` is free, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await write(self._take())

    def _takes_one_more(self) -> bool:
        if self._error is not None:
            return False
        if self._items >= self._items_max:
            self.end(StreamSlow(self._items_max))
            return False
        self._items += 1
        self._wake.set()
        return True

    def _take(self) -> lease_pb2.RouterSessionResponse:
        message, self._next = self._next, lease_pb2.RouterSessionResponse()
        for engine_id, engine in self._engines.items():
            if engine is None:
                message.engines_gone.append(engine_id)
            else:
                message.engines.append(engine)
        self._engines.clear()
        self._items = 0
        return message
