"""The gRPC server of the lease service: one listener, health, reflection, an orderly end."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvturn.address import address_of
from kvturn.tls import ServerTls
from kvturn.v1 import lease_pb2, lease_pb2_grpc
from kvturn_lease.callers import CallerInterceptor
from kvturn_lease.telemetry import TracingInterceptor

if TYPE_CHECKING:
    from kvturn.tracing import Tracing
    from kvturn_lease.callers import Callers
    from kvturn_lease.config import LeaseConfig
    from kvturn_lease.servicer import LeaseServicer

_SECOND_NS = 1_000_000_000


class ListenError(Exception):
    """The address cannot be listened on; the message is one line for the operator."""


class LeaseServer:
    """Serves a LeaseServicer until stop()."""

    def __init__(
        self,
        config: LeaseConfig,
        servicer: LeaseServicer,
        tracing: Tracing,
        callers: Callers | None = None,
    ) -> None:
        """`callers` says who may call what, None for everybody everything."""
        self._config = config
        self._servicer = servicer
        interceptors: list[grpc.aio.ServerInterceptor] = []  # type: ignore[type-arg]
        if callers is not None:
            interceptors.append(CallerInterceptor(callers))
        if tracing.tracer is not None:
            interceptors.append(TracingInterceptor(tracing))
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=_options(config),
            maximum_concurrent_rpcs=_calls_max(config),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(servicer, self._server)
        self._name = lease_pb2.DESCRIPTOR.services_by_name["LeaseService"].full_name
        names = (self._name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listens and serves; returns the port. Raises ListenError."""
        host, port = self._config.host, self._config.port
        _check_address(host, port)
        address = address_of(host, port)
        try:
            if self._config.tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                credentials = ServerTls(self._config.tls).credentials()
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ListenError(f"cannot listen on {address}") from None
        await self.set_leading(self._servicer.leads)
        await self._server.start()
        return bound

    async def set_leading(self, leading: bool) -> None:
        """Tells, as health of the service, whether it answers; that of the process stays good."""
        status = health_pb2.HealthCheckResponse
        serving = status.SERVING if leading else status.NOT_SERVING
        await self._health.set(self._name, serving)

    async def stop(self) -> None:
        """Ends session streams at once and other calls within the grace, then the listener."""
        await self._health.enter_graceful_shutdown()
        self._servicer.close()
        await self._server.stop(self._config.shutdown_grace_ns / _SECOND_NS)


def _calls_max(config: LeaseConfig) -> int:
    return config.lessor.engines_max + config.routers.sessions + config.questions_max


def _options(config: LeaseConfig) -> list[tuple[str, int]]:
    # Whoever does not answer for a session's TTL is gone, an engine as well as a router.
    ttl_ms = min(max(config.lessor.session_ttl_ns // 1_000_000, 100), 20_000)
    return [
        # Two processes on one port would each see half of the sessions.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        # Calls that wait for the event loop: gRPC would drop some above 1,000, as CANCELLED.
        ("grpc.server.max_pending_requests", _calls_max(config)),
        ("grpc.server.max_pending_requests_hard_limit", _calls_max(config) + 1),
        # Finds connections whose other end is gone without a word, also while there is nothing
        # to be said on them.
        ("grpc.keepalive_time_ms", ttl_ms // 2),
        ("grpc.keepalive_timeout_ms", ttl_ms),
        # That of a ping that measures the way, on whose answer a keepalive may wait.
        ("grpc.http2.ping_timeout_ms", ttl_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping as often as they like: never GOAWAY for too many pings.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _check_address(host: str, port: int) -> None:
    """Binds the address once, because gRPC's own error says neither what failed nor why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise cannot_listen(host, port, "port", error) from None


def cannot_listen(host: str, port: int, flag: str, error: OSError) -> ListenError:
    """Returns what to say of an address, whose port comes by `flag`, that cannot be listened on."""
    in_use = f"the port is in use; choose another --{flag}, 0 for any free one"
    reason = in_use if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return ListenError(f"cannot listen on {address_of(host, port)}: {reason}")
