"""One running router: its listeners, its fleet, its orderly end."""

import asyncio
import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING, Final

from kvturn.address import address_of
from kvturn.metrics import Histogram
from kvturn.tls import ServerTls
from kvturn_router.config import RouterConfig
from kvturn_router.engines.fleet import Fleet
from kvturn_router.engines.health_watch import HealthWatch
from kvturn_router.front.gate import Gate, shutting_down
from kvturn_router.front.grpc_front import GrpcFront
from kvturn_router.front.http_wire import ClientConnection, Listener
from kvturn_router.turn.forward import Forwarder, LeaseReuse
from kvturn_router.vanished import ask_after
from kvturn_router.worker_pages import WorkerPages

if TYPE_CHECKING:
    import ssl

_BACKLOG: Final = 4096
_SWEEP_S: Final = 1.0
_LOOK_S: Final = 0.01
_HANDSHAKE_S: Final = 10.0
"""How long a client may take for a TLS handshake."""
_UNDERWAY_S: Final = 0.5
"""How long after the last connection was taken requests may be on their way on those there are."""
_LAST_WORDS_S: Final = 0.5
"""How long clients have to take the error that ends their stream."""
_RELEASES_S: Final = 2.0
"""How long, after all turns, what prefill still holds for them may take to be released."""


class ListenError(Exception):
    """An address cannot be listened on; the message says which and why, in one line."""


class RouterServer:
    """Runs the parts that it is given, together. `grpc` is None for no gRPC front.

    `lag` takes by how many seconds the event loop is late.
    With `shares_ports` other processes may listen on the same ports; without it
    two routers on one port must not share it unnoticed.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        listener: Listener,
        fleet: Fleet,
        health: HealthWatch,
        forwarder: Forwarder,
        gate: Gate,
        lease: LeaseReuse | None,
        grpc: GrpcFront | None,
        pages: WorkerPages,
        lag: Histogram,
        shares_ports: bool = False,
        tls: ServerTls | None = None,
    ) -> None:
        self._config = config
        self._shares_ports = shares_ports
        self._tls = tls
        self._listener = listener
        self._fleet = fleet
        self._health = health
        self._forwarder = forwarder
        self._gate = gate
        self._lease = lease
        self._grpc = grpc
        self._pages = pages
        self._lag = lag
        self._server: asyncio.Server | None = None
        self._context: ssl.SSLContext | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.port = 0
        self.grpc_port: int | None = None

    @property
    def in_flight(self) -> int:
        """Turns being served."""
        return self._gate.turns

    async def start(self) -> None:
        """Asks after the engines, and listens once each has answered. Raises ListenError.

        Until then it refuses connections, so that clients go to other routers, or wait: turns
        that it took could not be served.
        """
        server = await self._bind()
        await self._pages.start()
        self._start_asking()
        await self._until_settled()
        await self._listen(server)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._sweep()), loop.create_task(self._tell_health())]

    async def _bind(self) -> asyncio.Server:
        host = self._config.host
        self._context = None if self._tls is None else self._tls.context()
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self._listener),
                host,
                self._config.port,
                backlog=_BACKLOG,
                reuse_port=self._shares_ports,
                ssl=self._context,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
                start_serving=False,
            )
        except OSError as error:
            raise cannot_listen(host, self._config.port, error) from None
        for listening in server.sockets:
            ask_after(listening)
        self._server = server
        self.port = server.sockets[0].getsockname()[1]
        grpc_port = self._config.grpc_port
        if self._grpc is not None and grpc_port is not None and not self._shares_ports:
            try:
                # gRPC's own error says neither what failed nor why.
                _try_address(host, grpc_port)
            except OSError as error:
                server.close()
                raise cannot_listen(host, grpc_port, error) from None
        return server

    async def _listen(self, server: asyncio.Server) -> None:
        host = self._config.host
        if self._grpc is not None and self._config.grpc_port is not None:
            await self._start_grpc(self._grpc, host, self._config.grpc_port)
        try:
            await server.start_serving()
        except OSError as error:
            raise cannot_listen(host, self._config.port, error) from None

    def _start_asking(self) -> None:
        if self._lease is not None:
            self._lease.client.start()
            self._lease.session.start()
        self._fleet.changed = self._changed.set
        self._health.start()

    async def _until_settled(self) -> None:
        """Waits for the first word of the lease service and of each engine, or the lack of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                while not self._is_settled():  # noqa: ASYNC110 (once, and of many sources)
                    await asyncio.sleep(_LOOK_S)

    def _is_settled(self) -> bool:
        if self._lease is not None and not self._lease.session.settled:
            return False
        return all(engine.health.asked for engine in self._fleet)

    async def _start_grpc(self, grpc: GrpcFront, host: str, port: int) -> None:
        try:
            credentials = None if self._tls is None else self._tls.credentials()
            self.grpc_port = await grpc.start(host, port, credentials)
        except OSError as error:
            await self._close_listener()
            raise cannot_listen(host, port, error) from None

    async def stop(self) -> None:
        """Says that it is not ready, takes no more, lets turns end within the grace, ends them.

        A client whose connection was taken may have sent its request before it could know: that
        one is served, and its connection closed after it; over gRPC, its calls of that moment are.
        """
        self._gate.draining = self._listener.draining = True
        told = None if self._grpc is None else asyncio.ensure_future(self._grpc.tell_draining())
        if self._config.drain_notice_s:
            await asyncio.sleep(self._config.drain_notice_s)
        await self._close_listener()
        if told is not None:
            await told
        grpc_stop: asyncio.Future[None] | None = None
        ends_at = asyncio.get_running_loop().time() + self._config.grace_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self._until_nothing_underway()
                self._gate.close()
                self._listener.close_idle()
                grpc_stop = self._stop_grpc(ends_at)
                await self._gate.empty()
        self._gate.close()
        grpc_stop = grpc_stop or self._stop_grpc(ends_at)
        self._forwarder.end_all(shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._gate.empty()
                if self._listener.connections:
                    await self._listener.emptied.wait()
        self._listener.abort()
        if grpc_stop is not None:
            await grpc_stop
        await self._forwarder.releases.finish(_RELEASES_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pages.stop()
        self._forwarder.tell_all()
        if self._lease is not None:
            await self._lease.session.stop()
            await self._lease.client.stop()
        await self._health.stop()
        self._fleet.close()

    async def _close_listener(self) -> None:
        """Stops listening, and takes the connections that were made till then.

        They would be reset without an answer, though their clients may have asked something.
        """
        if self._server is None:
            return
        kept = [socket.socket(fileno=os.dup(one.fileno())) for one in self._server.sockets]
        self._server.close()
        made: list[socket.socket] = []
        for listening in kept:
            listening.setblocking(False)
            with listening, contextlib.suppress(OSError):  # most often: there is none left
                while True:
                    made.append(listening.accept()[0])
        taken = [self._take(connection) for connection in made]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNDERWAY_S):
                await asyncio.gather(*taken, return_exceptions=True)

    async def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: ClientConnection(self._listener),
            connection,
            ssl=self._context,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
        )

    def _stop_grpc(self, ends_at: float) -> asyncio.Future[None] | None:
        if self._grpc is None:
            return None
        left_s = max(ends_at - asyncio.get_running_loop().time(), 0)
        return asyncio.ensure_future(self._grpc.stop(left_s + _LAST_WORDS_S))

    async def _until_nothing_underway(self) -> None:
        """Waits while requests may be on their way on connections that were taken."""
        if self._tls is not None or (self._grpc is not None and self._grpc.used):
            # gRPC does not tell of its connections, nor TLS of those that shake hands.
            await asyncio.sleep(_UNDERWAY_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNDERWAY_S):
                if self._listener.connections:
                    await self._listener.emptied.wait()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _SWEEP_S
            await asyncio.sleep(_SWEEP_S)
            self._lag.observe(max(loop.time() - due, 0.0))
            self._listener.sweep(loop.time())
            self._fleet.sweep()

    async def _tell_health(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._grpc is not None:
                await self._grpc.tell_health()


def _try_address(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def cannot_listen(host: str, port: int, error: OSError) -> ListenError:
    """Returns what to say of an address that cannot be listened on."""
    in_use = "the port is in use; choose another, 0 for any free one"
    reason = in_use if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return ListenError(f"cannot listen on {address_of(host, port)}: {reason}")
