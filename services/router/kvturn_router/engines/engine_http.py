"""HTTP/1.1 to one engine: raw protocols on kept-alive connections.

A connection serves one `Exchange` at a time. Bytes reach their reader from the
protocol's callback, without a coroutine per read; a coroutine waits only for
the head and for the end of an answer.

Connections idle for longer than the engine's own idle limit (vLLM: 5 s) are
not used again. One that the engine closes just as a request is on its way
shows as a `LostFault` with `stale` set: the caller decides whether that request
may be sent again.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Final, cast

import httptools

from kvturn_router.engines.host_lookup import HostLookup
from kvturn_router.engines.silence import SilenceWatch
from kvturn_router.vanished import ask_after, bound_sending

logger = logging.getLogger("kvturn.router.engines")

IDLE_S: Final = 4.0
"""Longest idle time after which a connection is used again."""

LATE: Final = 0.25
"""By which part of a time limit the router may come late and still trust what it saw."""

_HEAD_BYTES_MAX = 256 << 10
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})

Sink = Callable[[bytes, bool], None]
"""Takes the next bytes of a body, and whether they are its last."""


class EngineFault(Exception):
    """An engine gave no answer, or not a whole one. The message says why, in one line."""


class ConnectFault(EngineFault):
    """No connection: the engine has seen nothing of the request."""


class LostFault(EngineFault):
    """The connection ended early.

    `stale` is true if it had served an earlier request and not one byte of an
    answer came: most likely the engine closed an idle connection.
    """

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale


class SilentFault(EngineFault):
    """Nothing came for too long."""


class MalformedFault(EngineFault):
    """What came is not HTTP, or exceeds a limit."""


class Exchange:
    """One request on its way through a connection, and its answer.

    `headers` are complete, names in lower case, once `answered` has returned.
    """

    __slots__ = (
        "_connection",
        "_fault",
        "_has_head",
        "_paused",
        "_silence_s",
        "_sink",
        "_unread",
        "_waiter",
        "ended",
        "framed",
        "headers",
        "status",
    )

    def __init__(self, connection: "_Connection", silence_s: float) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.ended = False
        self.framed = True
        """Whether the answer says where it ends; else a connection that was cut looks like its end.
        """
        self._connection = connection
        self._silence_s = silence_s
        self._has_head = False
        self._fault: EngineFault | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._unread: list[bytes] = []
        self._paused = False
        connection.watch.add(self, connection.read_at + silence_s)

    def header(self, name: bytes) -> bytes:
        """Returns a header's value, empty if it was not sent."""
        for written, value in self.headers:
            if written == name:
                return value
        return b""

    async def answered(self) -> None:
        """Waits for the answer's head. Raises EngineFault."""
        while not self._has_head:
            await self._next()
            self._check()

    async def begun(self) -> bool:
        """Waits for the first bytes of the body; False if it ends without. Raises EngineFault."""
        while not self._unread and not self.ended:
            await self._next()
            self._check()
        return bool(self._unread)

    async def finished(self) -> None:
        """Waits for the end of the answer. Raises EngineFault."""
        while not self.ended:
            await self._next()
            self._check()

    async def body(self, bytes_max: int) -> bytes:
        """Waits for the end of the answer and returns its body.

        Raises EngineFault, also for more than `bytes_max` bytes.
        """
        pieces, self._unread = self._unread, []
        if self.ended and len(pieces) == 1 and len(pieces[0]) <= bytes_max:
            return pieces[0]
        size = sum(map(len, pieces))
        if not self.ended:

            def collect(data: bytes, last: bool) -> None:
                nonlocal size
                del last
                size += len(data)
                if size > bytes_max:
                    self.fail(_too_long(bytes_max))
                pieces.append(data)

            self._sink = collect
            await self.finished()
        if size > bytes_max:
            raise _too_long(bytes_max)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pass_to(self, sink: Sink) -> None:
        """Hands what has come to `sink`, and then all that comes."""
        unread, self._unread = self._unread, []
        if not self.ended:
            self._sink = sink
        sink(unread[0] if len(unread) == 1 else b"".join(unread), self.ended)

    def pause(self) -> None:
        """Reads no more until `resume`, so that a slow client slows the engine."""
        if not self.ended and not self._paused:
            self._paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        if self._paused:
            self._paused = False
            if not self.ended:
                self._connection.resume_reading()

    def close(self) -> None:
        """Gives the exchange up; the engine sees its connection end at once."""
        if not self.ended and self._fault is None:
            self.fail(LostFault("given up", stale=False))

    def fail(self, fault: EngineFault) -> None:
        """Ends the exchange with a fault, and its connection with it."""
        if self.ended or self._fault is not None:
            return
        self._fault = fault
        self._sink = None
        self._connection.watch.discard(self)
        self._connection.abort()
        self._wake()

    # What the watch calls

    def silent_at(self, now: float) -> float:
        """Returns when it will have been silent for too long; never while it is paused."""
        return (now if self._paused else self._connection.read_at) + self._silence_s

    def give_up(self) -> None:
        """Ends it for its silence."""
        self.fail(SilentFault(f"nothing came for {self._silence_s:g} s"))

    # What the connection calls

    def take_head(self, status: int, headers: list[tuple[bytes, bytes]], *, framed: bool) -> None:
        """Takes the head, which is complete."""
        self.status = status
        self.headers = headers
        self.framed = framed
        self._has_head = True
        self._wake()

    def take_body(self, data: bytes, last: bool) -> None:
        """Takes more of the body, or its end."""
        sink = self._sink
        if last:
            self.ended = True
            self._sink = None
            self._connection.watch.discard(self)
        if sink is not None:
            try:
                sink(data, last)
            except Exception:
                # Whoever waits for the answer must not wait for ever.
                logger.exception("an answer could not be passed on")
                self.ended = False
                self.fail(EngineFault("the router could not read its answer"))
        elif data:
            self._unread.append(data)
            self._wake()
        if last:
            self._wake()

    def _next(self) -> "asyncio.Future[None]":
        """Returns what ends with the next news: the head, unread bytes, the end or a fault."""
        self._check()
        self._waiter = self._connection.loop.create_future()
        return self._waiter

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _too_long(bytes_max: int) -> MalformedFault:
    return MalformedFault(f"the answer has more than {bytes_max} bytes")


class _Connection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: "EnginePool", loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.watch = pool.watch
        self.read_at = 0.0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._served = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        # A callback of its own would cost more than the rest of what a chunk costs.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._until_close = False
        self._complete = False
        self._count = 0  # pieces that are of the answer, once it is complete
        self._keeps = False

    @property
    def open(self) -> bool:
        """Whether a request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, silence_s: float) -> Exchange:
        """Sends a request; the connection must be idle."""
        assert self._exchange is None
        assert self._transport is not None
        self.read_at = self.loop.time()
        self._head_bytes = 0
        self._until_close = self._complete = False
        self._exchange = Exchange(self, silence_s)
        self._transport.write(request)
        return self._exchange

    def abort(self) -> None:
        """Ends the connection now; what was not sent is not sent."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self.read_at = self.loop.time()
        if self._transport is not None:
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        ask_after(connection)
        bound_sending(connection)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            # Nothing was asked.
            self.abort()
            return
        self.read_at = self._pool.heard_at = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(MalformedFault(f"the answer is not HTTP: {error}"))
            return
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES_MAX:
                exchange.fail(MalformedFault(f"the head has more than {_HEAD_BYTES_MAX} bytes"))
                return
        if self._pieces or self._complete:
            self._hand_over(exchange)

    def _hand_over(self, exchange: Exchange) -> None:
        pieces = self._pieces
        if self._complete and self._count < len(pieces):
            # Bytes after a whole answer belong to no request.
            del pieces[self._count :]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._complete:
            self._exchange = None
            self._served += 1
            if self._keeps and self._all_sent():
                self._pool.put_back(self)
            else:
                self.abort()
        exchange.take_body(data, self._complete)

    def _all_sent(self) -> bool:
        """Tells whether the request was taken whole: an engine may refuse one by its head."""
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        exchange = self._exchange
        if exchange is None:
            return
        if self._until_close and exc is None:
            self._complete = True
            self._count = len(self._pieces)
            self._keeps = False
            self._hand_over(exchange)
            return
        stale = self._served > 0 and self._head_bytes == 0
        why = "the engine closed the connection" if exc is None else f"connection lost: {exc}"
        exchange.fail(LostFault(why, stale=stale))

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:  # Another answer begins, to no request: the next one would be mixed up.
            self._keeps = False
            return
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # Not those after a body, which are too late to say anything of it.
        if self._head_bytes >= 0:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._exchange is None or self._complete:
            return
        self._head_bytes = -1
        self._until_close = status not in (204, 304) and not self._is_framed()
        self._exchange.take_head(status, self._headers, framed=not self._until_close)

    def _is_framed(self) -> bool:
        for name, _ in self._headers:  # noqa: SIM110 (any() takes five times as long)
            if name in _FRAMING:
                return True
        return False

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._keeps = self._parser.should_keep_alive() and not self._complete
        if not self._complete:
            self._complete = True
            self._count = len(self._pieces)


class EnginePool:
    """Connections to one engine.

    `host` and `port` are where it listens. `connect_timeout_s` bounds one
    attempt to connect. At most `idle_max` idle connections are kept. `tls`
    gives the TLS context of each new connection, None for none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_s: float,
        idle_max: int = 512,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._tls = tls
        self._host = host
        self._port = port
        self._lookup = HostLookup(host)
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self.watch = SilenceWatch()
        self.heard_at = 0.0
        """When something of an answer last came, by the event loop's clock."""
        # Last put back, first used: the others age out.
        self._idle: dict[_Connection, float] = {}
        self._all: set[_Connection] = set()

    async def send(self, request: bytes, *, silence_s: float, fresh: bool = False) -> Exchange:
        """Sends a request, head and body, and returns its exchange.

        `silence_s` bounds the wait for each next byte. `fresh` opens a new
        connection in any case. Raises ConnectFault.
        """
        connection = None if fresh else self._take_idle()
        if connection is None:
            connection = await self._connect()
        return connection.start(request, silence_s)

    async def answered(
        self,
        request: Callable[[], bytes],
        *,
        silence_s: float,
        again_if_stale: bool = True,
        sent: Callable[[Exchange], None] = lambda _: None,
    ) -> Exchange:
        """Sends a request and returns its exchange, answered.

        `request` returns what is sent, head and body, for each attempt. With `again_if_stale` there
        is a second one, on a new connection, if the first was lost on one used before, without a
        byte of an answer. `sent` is called with each exchange as soon as its request is on the way.
        `silence_s` bounds the wait for each next byte. Raises EngineFault.
        """
        for fresh in (False, True):
            exchange = await self.send(request(), silence_s=silence_s, fresh=fresh)
            sent(exchange)
            try:
                await exchange.answered()
            except LostFault as fault:
                if fresh or not (fault.stale and again_if_stale):
                    raise
            except BaseException:
                exchange.close()
                raise
            else:
                return exchange
        raise AssertionError("the second attempt returns or raises")

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.open and connection.loop.time() - since <= IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            connection = await self._dial(loop)
            if connection is None and loop.time() - began > (1 + LATE) * self._connect_timeout_s:
                connection = await self._dial(loop)  # It was the router that took so long.
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason or error
            raise ConnectFault(f"no TLS connection: {why}") from None
        except OSError as error:
            raise ConnectFault(f"no connection: {error.strerror or error}") from None
        if connection is None:
            raise ConnectFault(self.no_answer("connection", self._connect_timeout_s))
        self._all.add(connection)
        return connection

    async def _dial(self, loop: asyncio.AbstractEventLoop) -> _Connection | None:
        """Returns a new connection, None if it does not come in time. Raises OSError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._lookup.addresses()
                for address in addresses[:-1]:
                    with contextlib.suppress(OSError):
                        return await self._dial_at(loop, address)
                return await self._dial_at(loop, addresses[-1])
        except TimeoutError:
            return None

    async def _dial_at(self, loop: asyncio.AbstractEventLoop, address: str) -> _Connection:
        tls = None if self._tls is None else self._tls()
        _, connection = await loop.create_connection(
            lambda: _Connection(self, loop),
            address,
            self._port,
            ssl=tls,
            # Of the name that was given, and not of where it leads.
            server_hostname=None if tls is None else self._host,
        )
        return connection

    def no_answer(self, what: str, limit_s: float) -> str:
        """Returns what to say where nothing came in time: `what`, or the engine's address."""
        if self._lookup.is_asked:
            return f"{self._host} could not be looked up within {limit_s:g} s"
        return f"no {what} within {limit_s:g} s"

    def put_back(self, connection: _Connection) -> None:
        """Called by a connection whose exchange has ended and that can serve another."""
        if len(self._idle) < self._idle_max:
            self._idle[connection] = connection.read_at
        else:
            connection.abort()

    def forget(self, connection: _Connection) -> None:
        """Called by a connection that has ended."""
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def sweep(self, now: float) -> None:
        """Closes connections that have been idle too long; `now` is the loop's time."""
        for connection, since in list(self._idle.items()):
            if now - since > IDLE_S:
                del self._idle[connection]
                connection.abort()

    def close(self) -> None:
        """Ends every connection."""
        self.watch.stop()
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()


def request_bytes(
    method: bytes,
    path: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    parts: Sequence[bytes] = (),
) -> bytes:
    """Returns a request as it goes on the wire; `parts` joined are its body."""
    head = b"".join([b"%b: %b\r\n" % header for header in headers])
    length = sum(map(len, parts))
    start = b"%b %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (method, path, head, length)
    return b"".join([start, *parts])
