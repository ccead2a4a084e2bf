"""A TCP proxy for tests: passes bytes on, cuts connections, stops listening."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class TcpProxy:
    """Stands between clients and one server."""

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.connections = 0
        """How many were made so far."""
        self.cut_after: int | None = None
        """Cuts the next connection that has got so many bytes from the server; once."""
        self.swallow = False
        """Takes bytes and passes none on; a connection that lost some stays dumb for good."""
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(self) -> None:
        """Listens, again on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Cuts every connection and takes no new one."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Cuts every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._tasks.discard(task)
        self._tasks.add(task)
        pair = {writer, there[1]}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._pump(reader, there[1], from_server=False),
                self._pump(there[0], writer, from_server=True),
            )
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_server: bool
    ) -> None:
        passed = 0
        dumb = False
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                dumb = dumb or self.swallow
                if dumb:
                    continue
                if from_server and self.cut_after is not None:
                    left = self.cut_after - passed
                    if len(data) >= left:
                        self.cut_after = None
                        writer.write(data[:left])
                        await writer.drain()
                        break
                passed += len(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
