"""HTTP/1.1 from clients: raw protocol, one request of a connection at a time.

Requests that a client sends ahead wait their turn, within limits. A client that
closes its side is gone: what is being done for it is cancelled at once, so a
connection is read from even while its request is served.
"""

import asyncio
import email.utils
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Protocol, cast

import httptools
import msgspec

from kvturn_router.errors import ErrorCounts, TurnError
from kvturn_router.front.body_budget import BodyBudget
from kvturn_router.vanished import VANISHED_S, has_vanished

_AHEAD_MAX: Final = 16
"""Requests of one connection that may wait their turn."""

_DISCARD_S: Final = 2.0
"""How long what follows a refused request is read and dropped, so that the client sees why."""

_HEADERS_MAX: Final = 256

_HEADS_TRIED: Final = 8
"""Heads of one connection that are kept to compare the next with, the latest at a time."""

_SMALL_BYTES: Final = 1024
"""Pieces of a body below this are put together as they come."""

# Names as clients write them, lower-cased once and for all.
_NAMES = {
    written.encode(): name
    for name in (
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "host",
        "traceparent",
        "user-agent",
    )
    for written in (name, name.title())
}

_NOT_PLAIN = frozenset({"transfer-encoding", "expect", "upgrade"})
"""Headers that say more of a request's bytes than how many follow."""

_length_field = re.compile(rb"\r\n(?i:content-length): *([0-9]{1,9})\r\n")

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class HttpRequest(msgspec.Struct):
    """A request as it came. Header names are in lower case, values latin-1 text.

    `memo` is for what is read of the headers: a request of the same connection
    that has an equal head brings it again, with the same `headers`.
    """

    method: str
    target: bytes
    headers: dict[str, str]
    body: bytes
    keeps: bool
    chunks: bool
    memo: dict[str, object] = {}


class Flow(Protocol):
    """What can be made to wait while a client does not read."""

    def pause(self) -> None:
        """Stops reading."""

    def resume(self) -> None:
        """Reads again."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on one connection.

    Bodies above `body_bytes_max` are refused with 413, heads above
    `head_bytes_max` with 431. A request whose bytes stop coming for `request_s`,
    whose head takes longer than that or that is not whole after `whole_s` is
    refused, an idle connection is closed after `idle_s`, and a client that
    takes nothing of its answer for `stall_s` is given up.
    """

    body_bytes_max: int
    head_bytes_max: int
    request_s: float = 30.0
    whole_s: float = 300.0
    idle_s: float = 120.0
    stall_s: float = 300.0


class _KnownHead(msgspec.Struct, frozen=True):
    """A head that was read, around the digits of its content length, and the request it began.

    Clients send the same head with each turn, and to compare one takes a tenth of reading it.
    """

    before: bytes
    after: bytes
    request: HttpRequest

    def request_in(self, data: bytes) -> HttpRequest | None:
        """Returns the request if it has this head, and it is all that is in `data`."""
        start = len(self.before)
        end = data.find(b"\r", start, start + 10)
        digits = data[start:end] if end > 0 else b""
        if not (
            digits.isdigit()
            and data.startswith(self.before)
            and data.startswith(self.after, end)
            and len(data) - end - len(self.after) == int(digits)
        ):
            return None
        known = self.request
        return HttpRequest(
            known.method,
            known.target,
            known.headers,
            data[end + len(self.after) :],
            known.keeps,
            known.chunks,
            known.memo,
        )


def _known_head(head: bytes, lines: int, request: HttpRequest) -> _KnownHead | None:
    """Returns what to know of a head, None if it is not of the plainest form.

    `lines` are those that the parser found in it, `request` the one that it read.
    """
    length = _length_field.search(head)
    plain = request.keeps and request.chunks and request.headers.keys().isdisjoint(_NOT_PLAIN)
    if length is None or not plain or not lines == head.count(b"\r\n") == head.count(b"\n"):
        return None
    known = msgspec.structs.replace(request, body=b"")
    return _KnownHead(head[: length.start(1)], head[length.end(1) :], known)


Serve = Callable[["HttpAnswer", HttpRequest], None]
"""Begins to serve a request; the answer goes to the first argument."""


Admit = Callable[[bytes, dict[str, str], int | None], TurnError | None]
"""Judges a request by its target, its headers and its body's bytes, which are None where only their
end will tell; returns why it is refused, None if it is not."""


@dataclass(slots=True)
class Listener:
    """What all connections of one listener share.

    With `admit` a request that it refuses is answered before its body is read.
    """

    serve: Serve
    limits: WireLimits
    bodies: BodyBudget
    admit: Admit | None = None
    connections: set["ClientConnection"] = field(default_factory=set)
    errors: ErrorCounts = field(default_factory=ErrorCounts)
    """Errors that were answered."""
    draining: bool = False
    """Whether each connection is closed after the request that it serves, or serves next."""
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever the last connection has gone."""
    _date_s: int = 0
    _date_line: bytes = b""

    def date_line(self) -> bytes:
        """Returns the line of a Date header, made once a second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self._date_line = f"date: {email.utils.formatdate(now_s, usegmt=True)}\r\n".encode()
        return self._date_line

    def sweep(self, now: float) -> None:
        """Closes connections that took too long; `now` is the loop's time."""
        for connection in list(self.connections):
            connection.check_time(now)

    def close_idle(self) -> None:
        """Closes each connection as soon as it serves nothing."""
        self.draining = True
        for connection in list(self.connections):
            connection.close_idle()

    def abort(self) -> None:
        """Ends every connection now."""
        for connection in list(self.connections):
            connection.abort()


class HttpAnswer:
    """The answer to one request.

    Calls after the client has gone do nothing. `gone` is called once, when the
    client goes before the answer has ended.
    """

    def __init__(self, connection: "ClientConnection", request: HttpRequest) -> None:
        self.gone: Callable[[], object] = _nothing
        self.started = False
        self.loop = connection.loop
        self._connection: ClientConnection | None = connection
        self._keeps = request.keeps
        self._chunks = request.chunks
        self._bodiless = request.method == "HEAD"
        self._chunked = False
        self._head = b""
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        self._latest = b""

    def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Sends a whole answer."""
        self.begin(status, headers, len(body), None)
        self.write(body, True)

    def refuse(self, error: TurnError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Sends an error, and closes the connection if the request was not read whole."""
        if self._connection is not None:
            self._connection.listener.errors.add(error)
        self.whole(error.status, [*error.headers(), *headers], error.body())

    def begin(
        self,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        length: int | None,
        flow: Flow | None,
        more: bytes = b"",
    ) -> None:
        """Begins the answer; its head goes out with the first `write`.

        `length` is the body's length, None if not known. `flow` is paused while
        the client does not read. `more` are further header lines as they go on
        the wire.
        """
        assert not self.started
        self.started = True
        connection = self._connection
        if connection is None:
            return
        connection.let_body_go()
        self._headers = headers
        self._keeps = self._keeps and not connection.listener.draining
        if length is not None:
            more += b"content-length: %d\r\n" % length
        elif self._chunks:
            self._chunked = True
            more += b"transfer-encoding: chunked\r\n"
        else:
            self._keeps = False
        if not self._keeps:
            more += b"connection: close\r\n"
        more += connection.listener.date_line()
        self._head = head_bytes(status, headers, more)
        connection.take_flow(flow)

    def write(self, data: bytes, last: bool) -> None:
        """Sends more of the body, the head before it, and with `last` ends the answer."""
        connection = self._connection
        if connection is None:
            return
        if self._bodiless:
            data = b""
        elif data:
            self._latest = data
            if self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
        if last and self._chunked and not self._bodiless:
            data += b"0\r\n\r\n"
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            connection.send(data)
        if last:
            self._connection = None
            self.gone = _nothing
            connection.answered(self._keeps)

    def fail(self, error: TurnError) -> None:
        """Ends a begun answer that will not be whole: an error event, then the connection ends.

        The body is not ended in form, so that a client that does not know the
        event sees a broken answer too, never a finished one.
        """
        connection = self._connection
        if connection is None:
            return
        if _is_event_stream(self._headers):
            # An event that was cut off ends here, so that this one is read.
            gap = b"\n\n" if self._latest and not self._latest.endswith(b"\n\n") else b""
            self.write(gap + b"data: " + error.body() + b"\n\n", False)
        self._connection = None
        connection.close()

    def lost(self) -> None:
        """Called by the connection: the client is gone."""
        if self._connection is not None:
            self._connection = None
            self.gone()


class ClientConnection(asyncio.Protocol):
    """One connection from a client."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._current: HttpAnswer | None = None
        self._ahead: deque[HttpRequest] = deque()
        self._flow: Flow | None = None
        self._blocked = False
        # Bytes of answers that the client has yet to take, and when it last took some.
        self._untaken = 0
        self._taken_at = 0.0
        self._last_read = self._looked_at = self.loop.time()
        # When the request began that is being read, or was refused.
        self._began = self._last_read
        # The last head of a plain request, and the one being read as it came.
        self._known: _KnownHead | None = None
        self._heads_left = _HEADS_TRIED
        self._raw = b""
        # The request being read.
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes | bytearray] = []
        # Those of `_body`, which count against the budget of all connections.
        self._body_bytes = 0
        # Those of the request that is being served, until its answer begins.
        self._served_bytes = 0
        self._head_bytes = 0
        # Of the body, but not what it holds: what is around chunks, and trailers.
        self._around_bytes = 0
        self._in_head = True
        self._reading = False
        self._upgrading = False
        self._refused: TurnError | None = None
        self._closing = False

    # What the listener and the answer call

    def check_time(self, now: float) -> None:
        """Closes the connection if its client took too long."""
        if self._is_stalled(now):
            self.abort()
        if self._current is not None:
            if now - self._looked_at > VANISHED_S / 4:
                self._looked_at = now
                self._look_after_client()
            return
        quiet_s = now - self._last_read
        if self._closing:
            if quiet_s > _DISCARD_S or now - self._began > self.listener.limits.request_s:
                self.abort()
        elif self._reading:
            limits = self.listener.limits
            whole_s = limits.request_s if self._in_head else limits.whole_s
            if quiet_s > limits.request_s or now - self._began > whole_s:
                self._refuse(TurnError(408, "The request did not come whole.", reason="SLOW"))
        elif quiet_s > self.listener.limits.idle_s:
            self.close()

    def _look_after_client(self) -> None:
        """Ends the connection if its client is gone without a word in the midst of an answer."""
        if self._transport is not None and has_vanished(self._transport.get_extra_info("socket")):
            self.abort()

    def _is_stalled(self, now: float) -> bool:
        """Tells whether the client has taken nothing for too long, be the answer ended or not."""
        untaken = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if not untaken or untaken != self._untaken:
            self._untaken, self._taken_at = untaken, now
        return now - self._taken_at > self.listener.limits.stall_s

    def close_idle(self) -> None:
        """Closes the connection if it serves nothing."""
        if self._current is None and not self._reading:
            self.close()

    def send(self, data: bytes) -> None:
        """Sends bytes of an answer, unless the client is gone."""
        transport = self._transport
        # Between a broken connection and the loop's word of it, uvloop refuses to write.
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def take_flow(self, flow: Flow | None) -> None:
        """Names what to pause while the client does not read."""
        self._flow = flow
        if self._blocked and flow is not None:
            flow.pause()

    def let_body_go(self) -> None:
        """Called by the answer: the request's body is needed no more."""
        self.listener.bodies.left += self._served_bytes
        self._served_bytes = 0

    def answered(self, keeps: bool) -> None:
        """Called by the answer: it has ended."""
        self._current = None
        self._flow = None
        self._began = self._last_read = self.loop.time()
        if not keeps or self.listener.draining:
            self.close()
        elif self._ahead:
            self.loop.call_soon(self._serve_next)
        elif self._refused is not None:
            self._answer_refusal()

    def close(self) -> None:
        """Closes the connection once what was written has gone out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection now."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.listener.connections.add(self)
        self.listener.emptied.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self.listener.connections.discard(self)
        if not self.listener.connections:
            self.listener.emptied.set()
        self.listener.bodies.left += sum([len(ahead.body) for ahead in self._ahead])
        self._ahead.clear()
        self._drop_body()
        self.let_body_go()
        current, self._current = self._current, None
        if current is not None:
            current.lost()

    def eof_received(self) -> bool:
        # The client will send no more; for it to go on reading is so rare that
        # serving the ones that have gone is not worth it.
        self.abort()
        return False

    def pause_writing(self) -> None:
        self._blocked = True
        if self._flow is not None:
            self._flow.pause()

    def resume_writing(self) -> None:
        self._blocked = False
        if self._flow is not None:
            self._flow.resume()

    def data_received(self, data: bytes) -> None:
        self._last_read = self.loop.time()
        if self._closing or self._refused is not None:
            return
        if not self._reading:
            known = self._known
            if known is not None and self._current is None and not self._ahead:
                request = known.request_in(data)
                if request is not None and self._takes(request):
                    self._serve(request)
                    return
            self._raw = data if self._heads_left else b""
        self._reading = True
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._around_bytes += len(data)
        self._feed(data)
        read = self._head_bytes if self._in_head else self._around_bytes
        if read > self.listener.limits.head_bytes_max:
            self._refuse_head()

    def _takes(self, request: HttpRequest) -> bool:
        """Counts a request of a known head in; false if it is to be refused, as any other is."""
        listener = self.listener
        size = len(request.body)
        if size > listener.limits.body_bytes_max or size > listener.bodies.left:
            return False
        admit = listener.admit
        if admit is not None and admit(request.target, request.headers, size) is not None:
            return False
        listener.bodies.left -= size
        return True

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._parser.get_method() == b"CONNECT":  # It asks for nothing else.
                self._refuse(TurnError(405, "This is no proxy.", reason="METHOD_NOT_ALLOWED"))
                return
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._refused is None:
                self._refuse(
                    TurnError(400, f"The request is not HTTP: {error}.", reason="REQUEST_INVALID")
                )

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        # Some clients offer h2c with every request. The parser leaves the body
        # unread then: it gets the same head again, without the offer.
        skipped = ("upgrade", "connection", "http2-settings")
        lines = [
            f"{name}: {value}\r\n" for name, value in self._headers.items() if name not in skipped
        ]
        method = self._parser.get_method()
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (
            method,
            self._target,
            "".join(lines).encode("latin-1"),
        )
        self._parser = httptools.HttpRequestParser(self)
        self._upgrading = False
        self._feed(head + rest)

    # httptools

    def on_message_begin(self) -> None:
        self._target = b""
        self._fields = []
        self._in_head = True
        self._reading = True
        self._began = self._last_read

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Else a trailer: nothing here is read after the body.
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._around_bytes = 0
        self._headers = headers_of(self._fields)
        if self._raw:
            self._raw = self._raw[: self._raw.find(b"\r\n\r\n") + 4]
        if len(self._fields) > _HEADERS_MAX or self._head_is_long():
            self._refuse_head()
            return
        self._upgrading = self._parser.should_upgrade()
        length = int(self._headers.get("content-length", "0"))  # The parser takes digits alone.
        if length > self.listener.limits.body_bytes_max:
            self._refuse_body()
            return
        if length > self.listener.bodies.left:
            self._refuse(self.listener.bodies.exhausted())
            return
        coding = self._headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            self._refuse(
                TurnError(501, "Of codings only chunked is read here.", reason="CODING_UNKNOWN")
            )
            return
        admit = self.listener.admit
        size = length if coding is None else None
        if admit is not None and (refusal := admit(self._target, self._headers, size)) is not None:
            self._refuse(refusal)
        elif (
            not self._upgrading
            and self._headers.get("expect", "").lower() == "100-continue"
            and self._parser.get_http_version() == "1.1"  # Before, nobody knows of such answers.
            and self._current is None  # Else it would come in the midst of another's answer.
        ):
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _head_is_long(self) -> bool:
        most = self.listener.limits.head_bytes_max
        read, self._head_bytes = self._head_bytes, 0
        # What was read up to here may hold some of the body, or all.
        return read > most and sum([len(name) + len(value) for name, value in self._fields]) > most

    def on_body(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._around_bytes = 0
        size = len(data)
        budget = self.listener.bodies
        if self._body_bytes + size > self.listener.limits.body_bytes_max:
            self._refuse_body()
            return
        if size > budget.left:
            self._refuse(budget.exhausted())
            return
        budget.left -= size
        self._body_bytes += size
        if self._body and size < _SMALL_BYTES:
            self._add_small(data)
        else:
            self._body.append(data)

    def _add_small(self, data: bytes) -> None:
        # Objects of their own would take many times the bytes of small chunks.
        if not isinstance(self._body[-1], bytearray):
            self._body.append(bytearray())
        self._body[-1] += data

    def on_message_complete(self) -> None:
        if self._refused is not None or self._upgrading:
            return
        version = self._parser.get_http_version()
        # The first is always as it came.
        body = cast("bytes", self._body[0]) if len(self._body) == 1 else b"".join(self._body)
        self._reading = False
        self._in_head = True
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            target=self._target,
            headers=self._headers,
            body=body,
            # A client of HTTP/1.0 waits for the end where the answer does not say that it keeps.
            keeps=self._parser.should_keep_alive() and version == "1.1",
            chunks=version == "1.1",
            memo={},
        )
        if self._raw:
            self._known = _known_head(self._raw, len(self._fields) + 2, request)
            self._heads_left -= 1
            self._raw = b""
        if version not in ("1.0", "1.1"):
            self._refuse(TurnError(505, "Speak HTTP/1.1.", reason="REQUEST_INVALID"))
        elif self._current is None and not self._ahead:
            self._take_body()
            self._serve(request)
        elif self._may_wait(request):
            self._take_body()
            self._ahead.append(request)
        else:
            self._refuse(
                TurnError(
                    429,
                    "Too many requests sent ahead.",
                    reason="TOO_MANY_AHEAD",
                    retry_after_s=1,
                )
            )

    def _take_body(self) -> None:
        """Leaves the body that was read to its request, which counts it from now on."""
        self._body = []
        self._body_bytes = 0

    def _drop_body(self) -> None:
        """Gives up the body that is being read."""
        self.listener.bodies.left += self._body_bytes
        self._take_body()

    def _may_wait(self, request: HttpRequest) -> bool:
        waiting = sum(len(ahead.body) for ahead in self._ahead) + len(request.body)
        return len(self._ahead) < _AHEAD_MAX and waiting <= self.listener.limits.body_bytes_max

    def _serve(self, request: HttpRequest) -> None:
        self._served_bytes = len(request.body)
        answer = HttpAnswer(self, request)
        self._current = answer
        self.listener.serve(answer, request)

    def _serve_next(self) -> None:
        if self._current is None and self._ahead and self._transport is not None:
            self._serve(self._ahead.popleft())

    # Refusals of what cannot be read

    def _refuse_head(self) -> None:
        most = self.listener.limits.head_bytes_max
        self._refuse(
            TurnError(
                431,
                f"The head has more than {most} bytes or {_HEADERS_MAX} fields.",
                reason="HEAD_TOO_LARGE",
            )
        )

    def _refuse_body(self) -> None:
        most = self.listener.limits.body_bytes_max
        self._refuse(
            TurnError(413, f"The body has more than {most} bytes.", reason="BODY_TOO_LARGE")
        )

    def _refuse(self, error: TurnError) -> None:
        if self._refused is not None:
            return
        self._refused = error
        self._drop_body()
        if self._current is None and not self._ahead:
            self._answer_refusal()

    def _answer_refusal(self) -> None:
        error = self._refused
        if error is None or self._closing:
            return
        self._closing = True
        self.listener.errors.add(error)
        self._began = self.loop.time()
        body = error.body()
        more = b"content-length: %d\r\nconnection: close\r\n" % len(body)
        more += self.listener.date_line()
        self.send(head_bytes(error.status, error.headers(), more) + body)
        # The connection stays open for a moment and drops what still comes: a
        # client that is writing its body would otherwise see a reset, not this.
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()


def head_bytes(status: int, headers: Sequence[tuple[bytes, bytes]], more: bytes) -> bytes:
    """Returns the head of an answer as it goes on the wire; `more` are further lines of it."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (status, _REASONS.get(status, b""), lines, more)


def headers_of(fields: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns headers by lower-case name; the values of one sent again are joined by commas."""
    headers: dict[str, str] = {}
    for name, value in fields:
        key = _NAMES.get(name) or name.lower().decode("latin-1")
        if key in headers:
            headers[key] += ", " + value.decode("latin-1")
        else:
            headers[key] = value.decode("latin-1")
    return headers


def _is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def _nothing() -> None:
    return
