"""One request of a turn to one engine: how it is written, sent and answered."""

import os
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import Final

import msgspec

from kvturn.tracing import Span
from kvturn_router.engines.engine_http import (
    EngineFault,
    Exchange,
    LostFault,
    MalformedFault,
    SilentFault,
)
from kvturn_router.engines.engine_key import EngineKey
from kvturn_router.engines.fleet import Engine
from kvturn_router.errors import EngineRefusal, TurnError
from kvturn_router.request.intake import TurnRequest

ANSWER_BYTES_MAX: Final = 256 << 20
"""Longest answer that is held in memory whole: prefill's, and one not streamed."""

_ERROR_BYTES_MAX: Final = 16 << 20

# About the connection to the engine, or about bytes that the router counts and
# dates itself.
_NOT_RELAYED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
        b"set-cookie",
    }
)
_OURS = b"x-kvturn-"
"""How headers begin in which the router alone tells of a turn."""
_RELAYED_OF_REFUSAL = frozenset({b"content-type", b"retry-after", b"www-authenticate"})


class RequestIds:
    """Ids under which engines know requests: unique per attempt, never a client's own."""

    def __init__(self) -> None:
        self._prefix = f"kvt-{os.urandom(6).hex()}".encode()
        self._numbers = count(1)

    def next(self) -> bytes:
        """Returns an id that no other request has, of this router or of another."""
        return b"%b-%x" % (self._prefix, next(self._numbers))


class Legs:
    """Sends requests to engines.

    `key` is the router's own for engines; without one each client's is passed on.
    """

    def __init__(self, ids: RequestIds, key: EngineKey) -> None:
        self._ids = ids
        self._key = key

    async def send(
        self,
        engine: Engine,
        request: TurnRequest,
        path: str,
        parts: Sequence[bytes],
        span: Span,
        *,
        silence_s: float,
        again_if_stale: bool,
        sent: Callable[[Exchange], None] = lambda _: None,
    ) -> Exchange:
        """Sends a POST and returns its exchange, answered.

        `parts` are the body's. `silence_s` bounds the wait for each next byte
        of the answer. With `again_if_stale` a request that was lost on a
        connection used before, without a byte of an answer, is sent once more
        on a new one and under a new id. `sent` is called with each exchange as
        soon as its request is on the way. Raises EngineFault.
        """
        return await engine.pool.answered(
            partial(self._wire, engine, request, path, parts, span),
            silence_s=silence_s,
            again_if_stale=again_if_stale,
            sent=sent,
        )

    def _wire(
        self,
        engine: Engine,
        request: TurnRequest,
        path: str,
        parts: Sequence[bytes],
        span: Span,
    ) -> bytes:
        more = b""
        for header in request.passed_on:
            more += b"%b: %b\r\n" % header
        authorization = self._key.authorization or request.authorization
        if authorization is not None:
            more += b"authorization: %b\r\n" % authorization
        if span.traceparent is not None:
            more += b"traceparent: %b\r\n" % span.traceparent.encode()
        head = (
            b"POST %b HTTP/1.1\r\n%b: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (
            path.encode(),
            *engine.host_header,
            self._ids.next(),
            more,
            sum(map(len, parts)),
        )
        # Copied once, however long it is.
        return b"".join([head, *parts])


async def whole_body(exchange: Exchange, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
    """Returns the whole body of an answer, decompressed. Raises EngineFault."""
    body = await exchange.body(bytes_max)
    if exchange.header(b"content-encoding") in (b"gzip", b"deflate"):
        body = _unpacked(body, bytes_max)
        exchange.headers = [item for item in exchange.headers if item[0] != b"content-encoding"]
    if not exchange.framed and exchange.status == 200:
        _check_end(exchange, body)
    return body


def _check_end(exchange: Exchange, body: bytes) -> None:
    """Raises LostFault for JSON that was cut, where nothing but itself tells."""
    if exchange.header(b"content-type").startswith(b"application/json"):
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except msgspec.DecodeError:
            raise cut_off() from None
        except RecursionError:
            return


def cut_off() -> LostFault:
    """Returns what is wrong with an answer that ended early, though its connection was closed."""
    return LostFault("the engine closed the connection within its answer", stale=False)


def _unpacked(packed: bytes, bytes_max: int) -> bytes:
    pieces: list[bytes] = []
    left = bytes_max
    while packed or not pieces:  # One piece after the other, each compressed by itself.
        unpacker = zlib.decompressobj(wbits=47)
        try:
            # One more than there may be: none would be no limit.
            pieces.append(unpacker.decompress(packed, left + 1))
        except zlib.error as error:
            raise EngineFault(f"the answer cannot be decompressed: {error}") from None
        left -= len(pieces[-1])
        if left < 0:
            raise EngineFault(f"the answer has more than {bytes_max} bytes")
        if not unpacker.eof:
            raise EngineFault("the compressed answer was cut")
        packed = unpacker.unused_data.lstrip(b"\0")  # what some fill up with
    return b"".join(pieces)


async def refusal_of(exchange: Exchange) -> EngineRefusal:
    """Returns the error answer that an exchange brings. Raises EngineFault, also for what is none.

    A redirection, or a success without the answer that was asked for, is nothing to tell a client.
    """
    if not 400 <= exchange.status <= 599:
        raise MalformedFault(f"its status is {exchange.status}")
    body = await whole_body(exchange, _ERROR_BYTES_MAX)
    kept = _RELAYED_OF_REFUSAL | {b"content-encoding"}
    headers = [header for header in exchange.headers if header[0] in kept]
    return EngineRefusal(exchange.status, headers, body)


def relayed_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an answer that are about the answer itself."""
    dropped: Collection[bytes] = _NOT_RELAYED
    if named := exchange.header(b"connection"):
        dropped = _NOT_RELAYED | {name.strip().lower() for name in named.split(b",")}
    return [
        header
        for header in exchange.headers
        if header[0] not in dropped and not header[0].startswith(_OURS)
    ]


def engine_error(role: str, fault: EngineFault) -> TurnError:
    """Returns what a client is told of an engine that gave no answer."""
    silent = isinstance(fault, SilentFault)
    return TurnError(
        504 if silent else 502,
        f"The {role} engine gave no answer: {fault}.",
        reason="ENGINE_SILENT" if silent else "ENGINE_LOST",
    )


def no_engine(role: str, lack: str = "") -> TurnError:
    """Returns what a client is told when no engine of a role is usable; `lack` says why."""
    return TurnError(
        503,
        f"No {role} engine is usable now" + (f": {lack}." if lack else "."),
        reason="NO_ENGINE",
        retry_after_s=1,
    )
