"""The small HTTP listener of a lease service: `/metrics` for Prometheus, `/health` for whoever
starts and watches it. GET alone, one request a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Final

from kvturn.metrics_page import written
from kvturn_lease.metrics import FAMILIES
from kvturn_lease.server import cannot_listen

if TYPE_CHECKING:
    from kvturn_lease.metrics import LeaseMetrics

CONNECTIONS_MAX: Final = 32
"""Connections at once; more are closed unread."""
_HEAD_BYTES_MAX: Final = 8 * 1024
_REQUEST_S: Final = 5.0
"""How long a client may take to ask, and to take the answer."""
_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}

logger = logging.getLogger("kvturn.lease")


class MetricsListener:
    """Answers until stop()."""

    def __init__(self, metrics: LeaseMetrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}
        """With when each is over."""

    async def start(self) -> int:
        """Listens; returns the port. Raises ListenError."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_HEAD_BYTES_MAX
            )
        except OSError as error:
            raise cannot_listen(self._host, self._port, "metrics-port", error) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, and cuts off what is under way."""
        if self._server is not None:
            self._server.close()
        over = list(self._connections.values())
        for writer in self._connections:
            writer.transport.abort()
        await asyncio.gather(*over)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over = self._connections[writer] = asyncio.get_running_loop().create_future()
        try:
            if len(self._connections) <= CONNECTIONS_MAX:
                with contextlib.suppress(
                    OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
                ):
                    async with asyncio.timeout(_REQUEST_S):
                        await self._answer(reader, writer)
        except Exception:
            logger.exception("a question at the metrics' listener could not be answered")
        finally:
            del self._connections[writer]
            over.set_result(None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        asked, *fields = head.split("\r\n")
        headers = dict(_field(line) for line in fields if ":" in line)
        status, kind, body = await self._told(asked.split(" "), headers.get("accept", ""))
        if asked.startswith("HEAD "):
            length, body = len(body), b""
        else:
            length = len(body)
        writer.write(
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {kind}\r\n"
            f"content-length: {length}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    async def _told(self, asked: list[str], accept: str) -> tuple[int, str, bytes]:
        """Returns status, content type and body of the answer to a request line."""
        if len(asked) != 3:
            return 400, _TEXT, b"This is no HTTP request.\n"
        method, target, _ = asked
        path = target.partition("?")[0]
        if path not in ("/metrics", "/health"):
            return 404, _TEXT, b"There are /metrics and /health here.\n"
        if method not in ("GET", "HEAD"):
            return 405, _TEXT, b"Use GET here.\n"
        if path == "/health":
            health = {"status": "ok", "leading": self._metrics.leads}
            return 200, "application/json", json.dumps(health).encode()
        kind, page = await written(FAMILIES, {"": self._metrics.page()}, accept)
        return 200, kind, page


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
