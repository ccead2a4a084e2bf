"""A router with engines that take note, and what holds of it whatever came in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import uvloop
from router_harness import Rig, router

from fuzz.bodies import ROUTES
from fuzz.streams import SMUGGLED, Stream
from fuzz.verdict import judge, read
from kvturn_router.request.responses import RESPONSES

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from stub_engine import Reply, Seen

    from fuzz.calls import Call

QUIET_S: Final = 0.08
"""How long nothing comes before a stream is taken for one that waits for more."""

GUARD_S: Final = 120.0

STATUSES: Final = frozenset((100, 200, 400, 404, 405, 413, 415, 429, 431, 501, 505))
"""What a client may be told while the engines are well."""

CODES: Final = frozenset(("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"))
"""The same for calls."""

_CLOSING: Final = b"GET /health HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n"


@dataclass
class Outcome:
    """What came of one stream."""

    statuses: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """Of the turns that decode was given, in order."""
    ended: bool = False
    """Whether the router ended the connection."""
    reset: bool = False
    """Whether it did so while more was being sent, so that answers may be lost on the way."""

    def may_be(self, other: Outcome) -> bool:
        """Tells whether two outcomes can be of one stream, as far as they are known."""
        alike = self.ended == other.ended and self._final() == other._final()
        return self.models == other.models and (self.reset or other.reset or alike)

    def _final(self) -> list[int]:
        return [status for status in self.statuses if status != 100]


class Front:
    """One router in a loop of its own; use as a context manager."""

    def __enter__(self) -> Front:
        self._stack = contextlib.AsyncExitStack()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.rig: Rig = self.run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._stack.aclose())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the router's loop."""
        return self._runner.run(work)

    async def _start(self) -> Rig:
        flags = ("--health-interval-s=60", "--max-header-kb=16", "--max-body-mb=1")
        rig = await self._stack.enter_async_context(router(*flags))
        for path in ROUTES:
            rig.prefill.script(path, rig.prefill.prefill)
            rig.decode.script(path, _decode)
        address = f"127.0.0.1:{rig.server.grpc_port}"
        self._channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(address))
        return rig

    # Streams

    def check_stream(self, stream: Stream, splits: Sequence[int] = ()) -> Outcome:
        """Sends a stream, cut at the places given, and checks what comes of it."""
        outcome: Outcome = self.run(self._exchange(stream.data, splits))
        if stream.strict:
            assert SMUGGLED not in outcome.models
            served = [model for model in outcome.models if model in stream.models]
            assert served == [model for model in stream.models if model in served]
            if set(outcome.statuses) <= {100, 200} and not outcome.reset:
                assert served == list(stream.models)
        return outcome

    def check_cuts(self, example: tuple[Stream, Sequence[int]]) -> None:
        """Checks that a stream cut at some places comes to what it comes to whole."""
        stream, splits = example
        whole, cut = self.check_stream(stream), self.check_stream(stream, splits)
        assert cut.may_be(whole), (cut, whole)

    async def _exchange(self, data: bytes, splits: Sequence[int]) -> Outcome:
        rig = self.rig
        for engine in (rig.prefill, rig.decode):
            engine.seen.clear()
        client = await rig.client()
        received = bytearray()
        outcome = Outcome()
        data += _CLOSING
        places = [0, *sorted({place % (len(data) + 1) for place in splits}), len(data)]
        with contextlib.suppress(ConnectionError):
            for start, end in itertools.pairwise(places):
                if client.writer.transport.is_closing():
                    break
                client.writer.write(data[start:end])
                for _ in range(3 if len(places) > 2 else 0):
                    await asyncio.sleep(0)
        try:
            outcome.ended = await self._read_all(client.reader, received)
        except ConnectionError:
            outcome.ended = outcome.reset = True
        client.close()
        if not outcome.reset:
            outcome.statuses = _check_answers(bytes(received))
        await self._settle()
        outcome.models = self._check_seen()
        rig._clients.clear()
        return outcome

    # Calls

    def check_call(self, call: Call) -> None:
        """Makes a call and checks its status by what is in it."""
        code = self.run(self._call(call))
        assert code in CODES, f"status {code}"
        if not call.plain:
            return
        judged = None if call.route is None else judge(call.body, call.route).pairs
        if not _is_text(call.body):
            assert code != "OK"
        else:
            assert code == ("INVALID_ARGUMENT" if judged is None else "OK")

    async def _call(self, call: Call) -> str:
        for engine in (self.rig.prefill, self.rig.decode):
            engine.seen.clear()
        path = f"/kvturn.v1.RouterService/{call.method}"
        try:
            async with asyncio.timeout(GUARD_S):
                if call.method == "Chat":
                    async for _ in self._channel.unary_stream(path)(call.message):
                        pass
                else:
                    await self._channel.unary_unary(path)(call.message)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        await self._settle()
        self._check_seen()
        return code

    # What both need

    def _at_work(self) -> bool:
        server = self.rig.server
        tasks = server._listener.serve.__self__._tasks
        return bool(tasks or server._forwarder.in_flight or server._gate.turns)

    async def _read_all(self, reader: asyncio.StreamReader, received: bytearray) -> bool:
        """Reads until the end, or until nothing is to come; tells whether it was the end."""
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                if await self._is_quiet(reader):
                    return False
                continue
            if not data:
                return True
            received += data

    async def _is_quiet(self, reader: asyncio.StreamReader) -> bool:
        """Tells whether nothing is under way; time alone does not say it on a busy machine."""
        for _ in range(100):  # What lies in sockets is read meanwhile.
            await asyncio.sleep(0)
            if self._at_work():
                return False
        return not (reader._buffer or reader.at_eof())

    async def _settle(self) -> None:
        """Waits until the router has let go of everything; it must, soon."""
        async with asyncio.timeout(GUARD_S):
            while self._at_work() or self.rig.server._listener.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        health = await self.rig.ask("GET", "/health")
        assert health.status == 200

    def _check_seen(self) -> list[str]:
        """Checks what engines were given; returns the models of decode's turns."""
        models = []
        for engine in (self.rig.prefill, self.rig.decode):
            for turn in engine.turns:
                members = read(turn.body)
                assert members is not None, "an engine got what is no JSON object"
                given = dict(members)
                assert len(given) == len(members)
                assert judge(turn.body, turn.path).pairs is not None, "an engine got a bad turn"
                assert "conversation_id" not in given
                chosen = engine is self.rig.decode and turn.path == RESPONSES
                assert ("request_id" in given) == chosen
                if engine is self.rig.decode:
                    models.append(given["model"])
        return models


async def _decode(seen: Seen, reply: Reply) -> None:
    """Answers as decode, whatever numbers are in the request."""
    if not dict(read(seen.body) or ()).get("stream"):
        await reply.json({"choices": []})
        return
    await reply.begin_stream()
    await reply.event({"choices": []})
    await reply.end_stream()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_answers(data: bytes) -> list[int]:
    """Checks that bytes are whole answers, each of a status that may be; returns the statuses."""
    statuses = []
    while data:
        head, found, data = data.partition(b"\r\n\r\n")
        assert found, f"half an answer: {head[:200]!r}"
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = status_line.split(" ", 2)
        assert version == "HTTP/1.1"
        fields = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        assert len(fields) == len(lines)
        statuses.append(int(status))
        assert statuses[-1] in STATUSES, f"status {status}: {data[:300]!r}"
        body, data = _body(statuses[-1], fields, data)
        if statuses[-1] >= 400 and body:
            _check_error(statuses[-1], body)
    return statuses


def _body(status: int, fields: dict[str, str], data: bytes) -> tuple[bytes, bytes]:
    if status == 100:
        return b"", data
    if fields.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size, _, data = data.partition(b"\r\n")
            length = int(size, 16)
            assert data[length : length + 2] == b"\r\n"
            body, data = body + data[:length], data[length + 2 :]
            if not length:
                return body, data
    length = int(fields["content-length"])
    if data.startswith(b"HTTP/1.1 ") or len(data) < length:
        return b"", data  # The answer to a HEAD.
    return data[:length], data[length:]


def _check_error(status: int, body: bytes) -> None:
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == status
