"""A thousand streams through one router at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from awake import within
from recorded_spans import untraced
from router_harness import turn_body
from stub_engine import CHAT, GUARD_S, chunk, event

from kvturn_router.__main__ import compose
from kvturn_router.config import parse_config
from kvturn_router.server import RouterServer

STREAMS = 1000
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
PREFILLED = json.dumps(
    {
        "usage": {"prompt_tokens": 48, "completion_tokens": 1, "total_tokens": 49},
        "kv_transfer_params": {"remote_engine_id": "p", "remote_block_ids": [[1]]},
    }
).encode()
EVENTS = [event(chunk({"content": f"{number} "})) for number in range(5)] + [b"data: [DONE]\n\n"]


class Engine(asyncio.Protocol):
    """An engine's end of one connection: it holds every answer until it is let go on."""

    def __init__(self, held: "set[Engine]", *, streams: bool) -> None:
        self._held = held
        self._streams = streams
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or b"0"):
            return
        self._read = b""
        if head.startswith(b"GET"):
            self.transport.write(HEALTHY)
        elif self._streams:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._held.add(self)
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(PREFILLED), PREFILLED)
            )

    def send(self, data: bytes) -> None:
        """Sends a chunk of the stream; nothing ends it."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)


class Client(asyncio.Protocol):
    """A client of one turn, which keeps what it gets."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        body = json.dumps(turn_body(stream=True)).encode()
        self.transport.write(
            b"POST %b HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    @property
    def events(self) -> list[bytes]:
        """The events so far, if the answer is a good one."""
        assert self.got.startswith(b"HTTP/1.1 200 ")
        lines = bytes(self.got).partition(b"\r\n\r\n")[2].split(b"\r\n")
        return b"".join(lines[1::2]).split(b"\n\n")[:-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def system() -> AsyncIterator[tuple[RouterServer, set[Engine]]]:
    """A router with two engines of each role; the set has the streams that are held."""
    loop = asyncio.get_running_loop()
    held: set[Engine] = set()
    servers = [
        await loop.create_server(
            lambda streams=streams: Engine(held, streams=streams), "127.0.0.1", 0, backlog=1024
        )
        for streams in (False, False, True, True)
    ]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    flags = [f"--prefill={url}" for url in urls[:2]] + [f"--decode={url}" for url in urls[2:]]
    given = ["--port=0", "--no-grpc", "--health-interval-s=0.1", "--grace-s=0.2"]
    server = compose(parse_config([*given, *flags], {}), untraced())
    await server.start()
    await until(lambda: not server._fleet.missing())
    try:
        yield server, held
    finally:
        await server.stop()
        for one in servers:
            one.close()


async def a_thousand_clients(server: RouterServer) -> list[Client]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Client, "127.0.0.1", server.port) for _ in range(STREAMS)]
    return [client for _, client in made]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def leave_no_idle_connections(server: RouterServer) -> None:
    later = asyncio.get_running_loop().time() + 60
    for engine in server._fleet:
        engine.pool.sweep(later)


async def test_a_thousand_streams_run_at_once_and_leave_nothing_behind():
    """All are open before the first gets a token; each gets its events in order; then none is."""
    async with system() as (server, held):
        leave_no_idle_connections(server)
        before = descriptors()
        clients = await a_thousand_clients(server)
        await until(lambda: len(held) == STREAMS)
        streams = list(held)
        shares = [engine.in_flight for engine in server._fleet.decodes]
        assert sum(shares) == STREAMS
        assert max(shares) - min(shares) <= STREAMS // 10
        for sent, data in enumerate(EVENTS, 1):
            for stream in streams:
                stream.send(data)
            # Each event reaches all clients before the next is sent, long before any stream ends.
            await until(
                lambda sent=sent: all(client.got.count(b"\n\n") == sent for client in clients)
            )
        for stream in streams:
            stream.send(b"")
        await until(lambda: server._forwarder.in_flight == 0)
        await until(lambda: all(client.got.endswith(b"0\r\n\r\n") for client in clients))
        expected = [data.rstrip(b"\n") for data in EVENTS]
        assert all(client.events == expected for client in clients)
        for client in clients:
            client.transport.close()
        await until(lambda: not server._listener.connections)
        leave_no_idle_connections(server)
        await until(lambda: descriptors() <= before + 8)  # health connections come and go
        assert [engine.in_flight for engine in server._fleet] == [0] * 4


async def test_a_thousand_clients_that_hang_up_end_a_thousand_streams():
    """All leave in the middle: within two seconds the engines' connections have ended."""
    async with system() as (server, held):
        leave_no_idle_connections(server)
        before = descriptors()
        clients = await a_thousand_clients(server)
        await until(lambda: len(held) == STREAMS)
        for stream in held:
            stream.send(EVENTS[0])
        await until(lambda: all(b"data: " in client.got for client in clients))
        for client in clients:
            client.transport.abort()
        async with within(2):
            await until(lambda: not held)
        await until(lambda: server._forwarder.in_flight == 0)
        leave_no_idle_connections(server)
        await until(lambda: descriptors() <= before + 8)
        assert [engine.in_flight for engine in server._fleet] == [0] * 4
