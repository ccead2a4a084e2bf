"""The least P/D router that Python can be on uvloop: what of a turn is no router's to save.

    python -m bench.router.relay PORT PREFILL_PORT DECODE_PORT

It serves one engine of each role, on 127.0.0.1. It does what no two-step router can leave out: it
reads a request, cuts the body at its top level, asks prefill for one token, and decode for all of
them with the KV that prefill handed over. It does nothing else: no routes, keys, checks, limits,
deadlines, retries, health, metrics or conversations; decode's head, events and chunks reach the
client as they were read, and whoever fails leaves the others waiting. Not for use.

With 32 connections it is faster than the engines and the client beside it. So it is woken for each
turn, where a router with more to do finds several turns to go on with at once, and takes more time
in the kernel for a turn than that router: compare the time outside the kernel, and take no share of
the whole for the least that a router can take.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from typing import TYPE_CHECKING, Final, cast

import msgspec
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

HOST: Final = "127.0.0.1"

_ENDS_HEAD: Final = b"\r\n\r\n"
# An event ends in a blank line, so only the last chunk can look like this.
_ENDS_STREAM: Final = b"\r\n0\r\n\r\n"
_LENGTH: Final = b"content-length: "
_NOT_FOR_PREFILL: Final = ("max_tokens", "max_completion_tokens", "stream", "stream_options")
_PREFILL: Final = (
    b'{"max_tokens":1,"stream":false,'
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}'
)
# glibc's numbers for settings of malloc.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


_body_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)


class Whole:
    """Puts messages with a content length together, however they were cut into reads."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._left = 0

    def body(self, data: bytes) -> bytes | None:
        """Returns the body that `data` ends, None if it ends none."""
        if self._pieces:
            self._pieces.append(data)
            self._left -= len(data)
            if self._left > 0:
                return None
            data = b"".join(self._pieces)
            self._pieces.clear()
        begin = data.find(_ENDS_HEAD) + 4
        assert begin > 3, "a head came in two reads"
        length = data[:begin].lower().partition(_LENGTH)[2].partition(b"\r")[0]
        self._left = begin + int(length) - len(data)
        if self._left > 0:
            self._pieces.append(data)
            return None
        return data[begin:]


class EngineConnection(asyncio.Protocol):
    """A connection to an engine; what it reads goes to `take`, of whoever asked last."""

    def __init__(self, engine: Engine) -> None:
        self.take: Callable[[bytes], None] = _nobody
        self.write: Callable[[bytes], None] = _nobody
        self._idle = engine.idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop sets TCP_NODELAY on both sides. Its transports do not derive from asyncio's.
        self.write = cast("asyncio.Transport", transport).write

    def data_received(self, data: bytes) -> None:
        self.take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self in self._idle:
            self._idle.remove(self)


class Engine:
    """An engine, and connections to it that wait for a request."""

    def __init__(self, port: int) -> None:
        self.idle: list[EngineConnection] = []
        self._port = port
        self._head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b:%d\r\n" % (
            HOST.encode(),
            port,
        )
        self._head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(
        self, parts: list[bytes], client: ClientConnection, take: Callable[[bytes], None]
    ) -> None:
        """Sends a request for a client, to which `take` belongs; `parts` joined are its body."""
        if self.idle:
            connection = client.engine = self.idle.pop()
            connection.take = take
            connection.write(b"".join([self._head % sum(map(len, parts)), *parts]))
            return
        task = asyncio.get_running_loop().create_task(self._connect(parts, client, take))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, parts: list[bytes], client: ClientConnection, take: Callable[[bytes], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: EngineConnection(self), HOST, self._port
        )
        self.idle.append(connection)
        self.ask(parts, client, take)


class ClientConnection(asyncio.Protocol):
    """A connection from a client, and the turn that it asks for."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.engine: EngineConnection | None = None
        """The one that works for it."""
        self._prefill = prefill
        self._decode = decode
        self._request = Whole()
        self._answer = Whole()
        self._body = b""
        self._tail = b""
        self._write: Callable[[bytes], None] = _nobody
        # Made once: a bound method is an object.
        self._take_prefill = self._prefill_read
        self._take_decode = self._decode_read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("asyncio.Transport", transport).write

    def data_received(self, data: bytes) -> None:
        body = self._request.body(data)
        if body is None:
            return
        self._body = body
        parts = [_PREFILL]
        for name, value in _body_decoder.decode(body).items():
            if name not in _NOT_FOR_PREFILL:
                parts += (b',"%b":' % name.encode(), value)
        parts.append(b"}")
        self._prefill.ask(parts, self, self._take_prefill)

    def _prefill_read(self, data: bytes) -> None:
        answer = self._answer.body(data)
        if answer is None:
            return
        self._give_back(self._prefill)
        handed = _answer_decoder.decode(answer).kv_transfer_params
        # All that the client asked for, as it came, and one member more.
        body = self._body[: self._body.rindex(b"}")]
        self._body = b""
        self._decode.ask([body, b',"kv_transfer_params":', handed, b"}"], self, self._take_decode)

    def _decode_read(self, data: bytes) -> None:
        self._write(data)
        last = data if len(data) >= len(_ENDS_STREAM) else self._tail + data
        if last.endswith(_ENDS_STREAM):
            self._tail = b""
            self._give_back(self._decode)
        else:
            self._tail = last[-len(_ENDS_STREAM) :]

    def _give_back(self, engine: Engine) -> None:
        assert self.engine is not None
        engine.idle.append(self.engine)
        self.engine = None


def _nobody(data: bytes) -> None:
    del data


async def _serve(port: int, prefill: Engine, decode: Engine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(prefill, decode), HOST, port)
    gc.disable()  # A turn leaves no cycles.
    # Else glibc maps each block of 128 KB anew, and gives free memory back at once.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    _port, _prefill_port, _decode_port = map(int, sys.argv[1:])
    uvloop.run(_serve(_port, Engine(_prefill_port), Engine(_decode_port)))
