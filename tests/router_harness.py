"""A router under test: the real one, with stub engines and a scripted lease service.

Everything runs in the test's own event loop, on free ports of 127.0.0.1.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from recorded_spans import untraced
from stub_engine import CHAT, GUARD_S, StubEngine

from kvturn.tracing import Tracing
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_router.__main__ import compose
from kvturn_router.config import parse_config
from kvturn_router.server import RouterServer


@dataclass
class Answer:
    """An answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    """False if the connection ended before the body did."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Payloads of the body's events."""
        return [
            part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part.strip()
        ]

    @property
    def verdict(self) -> str:
        return self.headers["x-kvturn-verdict"]


class Client:
    """One raw connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Sends a request."""
        lines = [f"{method} {path} HTTP/1.1", "host: router"]
        if body is not None:
            lines += [f"content-length: {len(body)}"]
            if not any(name.lower() == "content-type" for name, _ in headers):
                lines += ["content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b""))
        await self.writer.drain()

    async def head(self) -> Answer:
        """Reads an answer's head."""
        async with asyncio.timeout(GUARD_S):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = text.rstrip("\r\n").split("\r\n")
        headers: dict[str, str] = {}
        for name, _, value in (line.partition(":") for line in lines):
            assert name not in headers, f"{name} is sent twice"
            headers[name] = value.strip()
        return Answer(int(start.split(" ")[1]), headers, b"")

    async def piece(self) -> bytes | None:
        """Reads one chunk of a chunked body; None at its end."""
        async with asyncio.timeout(GUARD_S):
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            data = await self.reader.readexactly(size + 2)
        return data[:-2] if size else None

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Reads a whole answer."""
        answer = await self.head()
        if bodiless or answer.status in (204, 304):
            return answer
        pieces: list[bytes] = []
        try:
            if answer.headers.get("transfer-encoding") == "chunked":
                while (piece := await self.piece()) is not None:
                    pieces.append(piece)
            elif "content-length" in answer.headers:
                async with asyncio.timeout(GUARD_S):
                    pieces.append(
                        await self.reader.readexactly(int(answer.headers["content-length"]))
                    )
            else:
                async with asyncio.timeout(GUARD_S):
                    pieces.append(await self.reader.read())
        except (asyncio.IncompleteReadError, ConnectionError):
            answer.whole = False
        answer.body = b"".join(pieces)
        return answer

    def close(self) -> None:
        self.writer.close()


def turn_body(**members: Any) -> dict[str, Any]:
    """Returns a chat body, with members added or, where None is given as `...`, left out."""
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
    }
    body |= members
    return {name: value for name, value in body.items() if value is not ...}


@dataclass
class FakeLease(lease_pb2_grpc.LeaseServiceServicer):
    """A lease service whose answers a test sets."""

    lease_id: str = ""
    verdict: str = "FIRST_TURN"
    http_address: str = ""
    longest_read_ms: int = 3000
    reading_ms: int | None = None
    forgotten: bool = False
    """Whether it knows no lease of any id."""
    silent: bool = False
    standby: str = ""
    """Reason of the ErrorInfo with which every question is refused; empty: it leads."""
    leader: str = ""
    """Whom it names then."""
    refused: int = 0
    """Questions that it refused so."""
    ended: list[common_pb2.ConversationKey] = field(default_factory=list)
    kept: list[lease_pb2.KeepConversationAliveRequest] = field(default_factory=list)
    engines: list[lease_pb2.Engine] = field(default_factory=list)
    """Those that its next session announces."""
    withholds: bool = False
    """Whether turns that begin on a session are taken note of and not answered."""
    hellos: list[lease_pb2.RouterHello] = field(default_factory=list)
    """One per session that began."""
    begun: list[lease_pb2.BeginTurn] = field(default_factory=list)
    turns_ended: list[lease_pb2.EndTurn] = field(default_factory=list)
    open_turns: dict[Any, set[int]] = field(default_factory=dict)
    """Turns that go on by what the router told, by the session that goes on."""
    batches: int = 0
    """Messages that came on sessions."""
    asked: list[str] = field(default_factory=list)
    leases: list[lease_pb2.Lease] = field(default_factory=list)
    """What every conversation has."""
    previous: lease_pb2.TurnTrace | None = None
    """What it says of the recorded turn before one that is recorded."""
    address: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> "FakeLease":
        """Serves, on the port given, else on a free one."""
        self.sessions: set[Any] = set()
        self._writing = asyncio.Lock()
        self._server = grpc.aio.server()
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _answerable(self, context: Any) -> None:
        if self.silent:
            await asyncio.Event().wait()
        if self.standby:
            self.refused += 1
            self.changed.set()
            info = error_details_pb2.ErrorInfo(reason=self.standby, domain="kvturn.v1")
            info.metadata["leader"] = self.leader
            detail = any_pb2.Any()
            detail.Pack(info)
            rich = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], details=[detail])
            await context.abort_with_status(rpc_status.to_status(rich))

    async def RouterSession(self, request_iterator: Any, context: Any) -> None:
        await self._answerable(context)
        self.sessions.add(context)
        turns = self.open_turns[context] = set()
        try:
            async for request in request_iterator:
                while self.silent:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                begun = (*request.hello.turns_in_flight, *request.begin_turns)
                turns.update(begin.turn_id for begin in begun)
                turns.difference_update(end.turn_id for end in request.end_turns)
                await self._take(request, context)
        finally:
            self.sessions.discard(context)
            del self.open_turns[context]
            self.changed.set()

    async def _take(self, request: lease_pb2.RouterSessionRequest, context: Any) -> None:
        response = lease_pb2.RouterSessionResponse()
        if request.HasField("hello"):
            self.hellos.append(request.hello)
            response.welcome.longest_read.CopyFrom(_milliseconds(self.longest_read_ms))
            response.engines.extend(self.engines)
        self.batches += 1
        self.begun.extend(request.begin_turns)
        self.turns_ended.extend(request.end_turns)
        if not self.withholds:
            response.turns.extend(self.answer_to(begin) for begin in request.begin_turns)
        if response.turns or response.HasField("welcome"):
            await self._write(context, response)
        self.changed.set()

    async def _write(self, context: Any, response: lease_pb2.RouterSessionResponse) -> None:
        async with self._writing:  # A stream takes one message at a time.
            await context.write(response)

    def answer_to(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
        """Returns what it answers a turn that begins on a session."""
        number = common_pb2.Verdict.Value(f"VERDICT_{self.verdict}")
        return lease_pb2.TurnBegun(
            turn_id=begin.turn_id,
            conversation_id=begin.conversation.conversation_id,
            turn=len(self.begun),
            lease_id=self.lease_id,
            verdict=None if self.lease_id else number,
            http_address=self.http_address,
            previous=self.previous if begin.HasField("trace") else None,
        )

    async def push(self, **members: Any) -> None:
        """Sends a message on every session."""
        for context in list(self.sessions):
            await self._write(context, lease_pb2.RouterSessionResponse(**members))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds that a message may bring about."""
        async with asyncio.timeout(GUARD_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ListTurns(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        key = request.conversation
        turns = {begin.turn_id for begin in self.begun if begin.conversation == key}
        reports = [end.report for end in self.turns_ended if end.turn_id in turns]
        if not turns:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such conversation")
        return lease_pb2.ListTurnsResponse(turns=reports, leases=self.leases)

    async def GetLease(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        self.asked.append(request.lease_id)
        if self.forgotten:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        lease = lease_pb2.Lease(lease_id=request.lease_id, state=lease_pb2.Lease.STATE_ACTIVE)
        if self.reading_ms is not None:
            lease.state = lease_pb2.Lease.STATE_READING
            lease.reading_for.CopyFrom(_milliseconds(self.reading_ms))
        return lease_pb2.GetLeaseResponse(lease=lease)

    async def EndConversation(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        self.ended.append(request.conversation)
        return lease_pb2.EndConversationResponse(leases_ended=1)

    async def KeepConversationAlive(self, request: Any, context: Any) -> Any:
        await self._answerable(context)
        self.kept.append(request)
        if request.conversation.conversation_id == "unknown":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such conversation")
        return lease_pb2.KeepConversationAliveResponse(kept=_milliseconds(60_000))


def announcement(engine: StubEngine, **members: Any) -> lease_pb2.Engine:
    """Returns what the lease service says of an engine that has a session; its id is its URL."""
    return lease_pb2.Engine(
        description=lease_pb2.EngineDescription(
            engine_id=engine.url,
            role=common_pb2.EngineRole.Value(f"ENGINE_ROLE_{engine.role.upper()}"),
            http_address=engine.url,
        ),
        **members,
    )


def _milliseconds(value: int) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(value)
    return duration


class Rig:
    """A router with its engines and, if asked for, its lease service."""

    def __init__(
        self,
        server: RouterServer,
        prefills: list[StubEngine],
        decodes: list[StubEngine],
        lease: FakeLease | None,
    ) -> None:
        self.server = server
        self.prefills = prefills
        self.decodes = decodes
        self.prefill = prefills[0]
        self.decode = decodes[0]
        self._lease = lease
        self._clients: list[Client] = []

    @property
    def lease(self) -> FakeLease:
        assert self._lease is not None
        return self._lease

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def client(self) -> Client:
        """Returns a new connection to the router."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.server.port))
        self._clients.append(client)
        return client

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Sends one request on a connection of its own and returns the answer."""
        client = await self.client()
        await client.send(method, path, body, headers)
        answer = await client.answer(bodiless=method == "HEAD")
        client.close()
        return answer

    async def post(
        self,
        body: dict[str, Any] | bytes,
        path: str = CHAT,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Posts a turn."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data, headers)

    async def until_ready(self) -> None:
        """Waits until the router says that it can serve turns."""
        async with asyncio.timeout(GUARD_S):
            while (await self.ask("GET", "/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_session(self) -> None:
        """Waits until the router has a session with the lease service, and is answered on it.

        A router is ready without one, too: on a busy machine its first attempt may take too long.
        """
        lease = self.server._lease
        assert lease is not None
        await self.until(lambda: lease.session.up)

    async def until(self, condition: Any) -> None:
        """Waits until a condition holds."""
        async with asyncio.timeout(GUARD_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.asynccontextmanager
async def router(
    *flags: str,
    prefills: int = 1,
    decodes: int = 1,
    lease: FakeLease | None = None,
    tracing: Tracing | None = None,
    ready: bool = True,
    announced: bool = False,
) -> AsyncIterator[Rig]:
    """Runs a router with stub engines until the block ends.

    `announced` engines are named by the lease service, others by flags.
    """
    p = [await StubEngine("prefill").start() for _ in range(prefills)]
    d = [await StubEngine("decode").start() for _ in range(decodes)]
    engines = [f"--prefill={x.url}" for x in p] + [f"--decode={x.url}" for x in d]
    if announced:
        assert lease is not None
        engines = []
        lease.engines += [announcement(x) for x in (*p, *d)]
    if lease is not None:
        await lease.start()
        # A busy machine must not turn answers into silence.
        engines += [f"--lease={lease.address}", "--question-deadline-ms=5000"]
    given = ["--port=0", "--grpc-port=0", "--health-interval-s=0.05", "--grace-s=0.2"]
    # Nor may it make an engine one that cannot be reached.
    given += ["--connect-timeout-s=30"]
    config = parse_config([*given, *engines, *flags], {})
    server = compose(config, tracing or untraced())
    await server.start()
    rig = Rig(server, p, d, lease)
    try:
        if ready:
            await rig.until_ready()
            if lease is not None:
                await rig.until_session()
        yield rig
    finally:
        rig.close_clients()
        await server.stop()
        for engine in (*p, *d):
            await engine.stop()
        if lease is not None:
            await lease.stop()
