"""Calls to an etcd cluster: one channel per endpoint, the next one when one is silent, a login.

A call that fails for want of an answer may have been applied, so only those that are safe to
repeat are repeated: reads, lease calls under a chosen id, transactions that guard themselves.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc
from grpc.aio import AioRpcError

from kvturn.etcd.v3 import etcd_pb2
from kvturn_lease.etcd.errors import (
    EtcdError,
    EtcdRefused,
    EtcdUnavailable,
    LoginNeeded,
    etcd_error,
)

if TYPE_CHECKING:
    from kvturn_lease.etcd.config import EtcdConfig

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 0.5
_LOGIN_TIMEOUT_S = 2.0
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # etcd answers with up to all keys of a lease at once.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # Not more often, nor without calls: etcd ends connections for too many pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
]


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...


Request = TypeVar("Request", bound=_Message)
Response = TypeVar("Response", bound=_Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """A method of etcd's API by its full name."""

    path: str
    request_type: type[Request]
    response_type: type[Response]


AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate",
    etcd_pb2.AuthenticateRequest,
    etcd_pb2.AuthenticateResponse,
)


@dataclass(frozen=True, slots=True)
class Stream:
    """An open stream and the endpoint it goes to."""

    call: Any
    """A grpc.aio stream-stream call."""
    endpoint: int


class Connection:
    """The channels to the cluster, of which one is in use."""

    def __init__(self, config: EtcdConfig) -> None:
        """Connects with the first call, not now. Raises OSError for unreadable certificates."""
        self._config = config
        self._credentials = _credentials(config)
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._current = 0
        self._token: str | None = None
        self._logins: dict[int, asyncio.Task[str]] = {}
        """By endpoint; each goes on for whoever comes next, whenever one who waits gives up."""

    async def close(self) -> None:
        """Ends all calls."""
        for login in list(self._logins.values()):
            login.cancel()
        for channel in self._channels.values():
            await channel.close(None)

    @property
    def endpoint(self) -> int:
        """Index of the endpoint in use."""
        return self._current

    @property
    def endpoint_count(self) -> int:
        """How many endpoints there are."""
        return len(self._config.endpoints)

    def leave(self, endpoint: int) -> None:
        """Takes the next endpoint if this one is still in use."""
        if endpoint == self._current:
            self._current = (endpoint + 1) % self.endpoint_count

    def forget_login(self) -> None:
        """Lets the next call log in anew."""
        self._token = None

    async def call(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        *,
        safe: bool,
    ) -> Response:
        """Makes a unary call, again and elsewhere if it is `safe` to repeat.

        Raises EtcdUnavailable after `timeout_s` at the latest, or another EtcdError.
        """
        patience = Patience(timeout_s, self.endpoint_count)
        logins = 0
        while True:
            try_s = patience.try_s()
            endpoint = self._current
            try:
                return await self._try(endpoint, method, request, try_s)
            except LoginNeeded as error:
                logins += 1
                if logins > 1 or not self._config.user:
                    raise EtcdRefused(str(error)) from None
            except EtcdUnavailable as error:
                self.leave(endpoint)
                if not safe:
                    raise
                await patience.pause(error)

    async def _try(
        self,
        endpoint: int,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
    ) -> Response:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                token = await self._logged_in(endpoint)
        except TimeoutError:
            raise EtcdUnavailable("no answer in time") from None
        left_s = timeout_s - (time.monotonic() - began_s)
        call = self._channel(endpoint).unary_unary(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,  # type: ignore[attr-defined]
        )
        try:
            response = await call(request, timeout=left_s, metadata=_metadata(token))
        except AioRpcError as error:
            raise self._judge(error, token) from None
        assert isinstance(response, method.response_type)
        return response

    async def open(self, method: Method[Request, Response]) -> Stream:
        """Opens a stream that ends when its member has lost the cluster's leader.

        Raises EtcdUnavailable or EtcdRefused if it cannot log in. read_from() reads it.
        """
        endpoint = self._current
        try:
            token = await self._logged_in(endpoint)
        except EtcdUnavailable:
            self.leave(endpoint)
            raise
        start: Any = self._channel(endpoint).stream_stream(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,  # type: ignore[attr-defined]
        )
        return Stream(start(metadata=(*_metadata(token), ("hasleader", "true"))), endpoint)

    async def read_from(self, stream: Stream) -> Any:
        """Returns the stream's next message. Raises EtcdError once it has ended."""
        try:
            message = await stream.call.read()
        except AioRpcError as error:
            raise self._judge(error, self._token) from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise EtcdUnavailable("the stream ended")
        return message

    def _judge(self, error: AioRpcError, token: str | None) -> EtcdError:
        judged = etcd_error(error)
        if isinstance(judged, LoginNeeded) and self._token == token:
            self._token = None
        return judged

    async def _logged_in(self, endpoint: int) -> str | None:
        """Returns the token to call with, None where no user is set."""
        if not self._config.user:
            return None
        if self._token is None:
            login = self._logins.get(endpoint)
            if login is None:
                login = self._logins[endpoint] = asyncio.create_task(self._log_in(endpoint))
                login.add_done_callback(functools.partial(self._note_login, endpoint))
            return await asyncio.shield(login)
        return self._token

    def _note_login(self, endpoint: int, login: asyncio.Task[str]) -> None:
        del self._logins[endpoint]
        if not login.cancelled() and login.exception() is None:
            self._token = login.result()

    async def _log_in(self, endpoint: int) -> str:
        request = etcd_pb2.AuthenticateRequest(
            name=self._config.user, password=self._config.password
        )
        call = self._channel(endpoint).unary_unary(
            AUTHENTICATE.path,
            request_serializer=etcd_pb2.AuthenticateRequest.SerializeToString,
            response_deserializer=etcd_pb2.AuthenticateResponse.FromString,
        )
        try:
            response = await call(request, timeout=_LOGIN_TIMEOUT_S)
        except AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            judged = etcd_error(error)
            if isinstance(judged, EtcdRefused):
                judged = EtcdRefused(f"login as {self._config.user} failed: {judged}")
            raise judged from None
        return str(response.token)

    def _channel(self, endpoint: int) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            address = self._config.endpoints[endpoint]
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(
                    address, self._credentials, options=_CHANNEL_OPTIONS
                )
            self._channels[endpoint] = channel
        return channel


class Patience:
    """Deals out the time of a call that may be tried several times."""

    def __init__(self, timeout_s: float, endpoints: int) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._untried = endpoints
        self._pause_s = PAUSE_S_MIN
        self._last = EtcdUnavailable("no answer in time")

    def try_s(self) -> float:
        """Returns how long the next try may take: each endpoint gets its share of what is left.

        Raises what the last try raised when nothing is left.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._last
        share_s = left_s / max(self._untried, 1)
        self._untried -= 1
        return share_s

    async def pause(self, error: EtcdUnavailable) -> None:
        """Notes why a try failed; waits a little if every endpoint was tried, longer each time."""
        self._last = error
        if self._untried > 0:
            return
        left_s = self._deadline_s - time.monotonic()
        await asyncio.sleep(max(0.0, min(self._pause_s, left_s)))
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    # Metadata of each call rather than call credentials, which gRPC sends over TLS only.
    return (("token", token),) if token else ()


def _credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    if config.ca_file is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=config.ca_file.read_bytes(),
        private_key=config.key_file.read_bytes() if config.key_file else None,
        certificate_chain=config.cert_file.read_bytes() if config.cert_file else None,
    )
