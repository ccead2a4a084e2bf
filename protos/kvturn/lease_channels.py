"""Channels to the endpoints of the lease service; questions go to the one that leads.

`leader.py` chooses. Here are the channels, the questions, and the probes: calls of the health
service, which says SERVING only where the leader is. Whatever the endpoints do, a question takes no
longer than its timeout in all. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvturn.leader import Leader
from kvturn.lease_access import LeaseAccess
from kvturn.v1 import lease_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvturn.v1.lease_pb2_grpc import LeaseServiceAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")
Metadata = tuple[tuple[str, str | bytes], ...]

CONNECT_S = 1.0
PROBE_TIMEOUT_S = 1.0
PROBE_PAUSE_S = 0.2
RETIRE_S = 15.0
"""Longer than any question may take: how long a replaced channel's last ones may go on."""
MESSAGE_BYTES_MAX = 256 * 1024 * 1024
NS_PER_S = 1_000_000_000

_CHANNEL_OPTIONS = (
    # One attempt per call: the deadline is far below a retry's backoff.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # An idle channel would have to connect again within the question deadline.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # A new channel is a new connection: the old one may be dead without a word.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

# grpc.health.v1, by hand: its package needs a newer protobuf than engines may have.
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVICE = b"kvturn.v1.LeaseService"
_HEALTH_QUESTION = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
_SERVING = b"\x08\x01"


_WORDS = {
    "NOT_LEADER": "none of its processes leads now",
    "STORE_UNAVAILABLE": "its store does not answer",
    "SHUTTING_DOWN": "it is shutting down",
}
"""What the reason of a refusal means to whoever reads it."""


class Unanswered(Exception):
    """No leader answered in time; the message says why, in words that follow "it" or the like."""

    def __init__(self, reason: str, message: str) -> None:
        """`reason`: of the last refusal, or the name of the last gRPC status."""
        super().__init__(message)
        self.reason = reason

    @property
    def store_unavailable(self) -> bool:
        """True if nobody can lead because the lease service's store does not answer."""
        return self.reason == "STORE_UNAVAILABLE"


class LeaseChannels:
    """One channel per endpoint of the lease service, and who of them leads."""

    def __init__(
        self,
        endpoints: Sequence[str],
        clock_ns: Callable[[], int],
        access: LeaseAccess | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        """Call it on the event loop. `clock_ns` is CLOCK_BOOTTIME, `endpoints` as for Leader.

        `connect_s` is how long a connection is given to come about.
        """
        self.leader = Leader(endpoints)
        self._clock_ns = clock_ns
        self._access = access or LeaseAccess()
        self._options = (
            *_CHANNEL_OPTIONS,
            # In fact the shortest time that a connection is given to come about.
            ("grpc.min_reconnect_backoff_ms", round(connect_s * 1000)),
        )
        self._channels = {one: self.connect(one) for one in self.leader.endpoints}
        self._stubs = {one: _stub(channel) for one, channel in self._channels.items()}
        self._probe_now = {one: asyncio.Event() for one in self.leader.endpoints}
        self._changed = asyncio.Event()
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    async def run(self) -> None:
        """Probes whoever is in doubt, until cancelled. Connects all channels to begin with."""
        self._note()
        async with asyncio.TaskGroup() as group:
            for endpoint in self.leader.endpoints:
                group.create_task(self._watch(endpoint))

    async def close(self, grace_s: float | None = None) -> None:
        """Closes all channels; questions under way may go on for `grace_s`."""
        channels = [*self._channels.values(), *self._retiring.values()]
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(channel.close(grace_s) for channel in channels))

    async def ask(
        self,
        rpc: Callable[[LeaseServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, A]],
        question: Q,
        *,
        timeout_s: float,
        metadata: Metadata = (),
    ) -> A:
        """Asks the leader; returns its answer within `timeout_s`, all endpoints taken together.

        Raises Unanswered when nobody leads or answers, AioRpcError for any other refusal.
        """
        deadline_ns = self._clock_ns() + round(timeout_s * NS_PER_S)
        tried: list[str] = []
        problem = Unanswered("SILENT", "it is silent")
        while (endpoint := self.leader.next(tried)) is not None:
            tried.append(endpoint)
            asked_ns = self._clock_ns()
            left_s = (deadline_ns - asked_ns) / NS_PER_S
            if left_s <= 0:
                break
            try:
                answer = await rpc(self._stubs[endpoint])(
                    question, timeout=left_s, metadata=(*metadata, *self._access.metadata)
                )
            except grpc.aio.AioRpcError as error:
                turned_away = self.refused(endpoint, error, asked_ns)
                if turned_away is None:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        self.leads(endpoint)  # Only the leader can know that.
                    raise
                if not problem.store_unavailable:
                    problem = turned_away
            else:
                self.leads(endpoint)
                return answer
        raise problem

    def connect(self, endpoint: str) -> grpc.aio.Channel:
        """Returns a channel of its own, for a long stream; the caller closes it."""
        return self._access.channel(endpoint, self._options)

    @property
    def metadata(self) -> Metadata:
        """What calls must carry that are made over a channel of their own."""
        return self._access.metadata

    # --- what was heard, also on streams of others ------------------------------------------------

    def leads(self, endpoint: str) -> None:
        """The endpoint has answered as leader."""
        self.leader.leads(endpoint, self._clock_ns())
        self._note()

    def silent(self, endpoint: str, asked_ns: int) -> None:
        """The endpoint has not answered what it was asked at `asked_ns`."""
        self.leader.silent(endpoint, asked_ns)
        self._note()

    def lost(self, endpoint: str) -> None:
        """The connection to the endpoint failed."""
        self.leader.lost(endpoint)
        self._note()

    def doubt(self, endpoint: str) -> None:
        """Less was heard of the endpoint than it should have said."""
        self.leader.doubt(endpoint)
        self._note()

    def refused(
        self, endpoint: str, error: grpc.aio.AioRpcError, asked_ns: int
    ) -> Unanswered | None:
        """Takes a failed call; returns None if another endpoint would answer no better."""
        code = error.code()
        reason, metadata = error_info(error)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
            self.silent(endpoint, asked_ns)
        elif code is not grpc.StatusCode.UNAVAILABLE:
            return None
        elif reason in ("NOT_LEADER", "STORE_UNAVAILABLE"):
            self.leader.stands_by(endpoint, metadata.get("leader", ""), self._clock_ns())
            self._note()
        else:
            self.lost(endpoint)
        return Unanswered(reason or code.name, self.problem(error))

    def problem(self, error: grpc.aio.AioRpcError) -> str:
        """Returns in words why a call failed, with the setting to look at if one is at fault."""
        reason, _ = error_info(error)
        return _WORDS.get(reason) or self._access.problem(error.code(), error.details() or "")

    async def another_leads(self, endpoint: str) -> None:
        """Returns as soon as another endpoint is known to lead."""
        while self.leader.known in ("", endpoint):
            self._changed.clear()
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        for endpoint in self.leader.doubted:
            self._probe_now[endpoint].set()

    # --- probes -----------------------------------------------------------------------------------

    async def _watch(self, endpoint: str) -> None:
        probe_now = self._probe_now[endpoint]
        while True:
            await probe_now.wait()
            probe_now.clear()
            await self._probe(endpoint)
            await asyncio.sleep(PROBE_PAUSE_S)
            self._note()

    async def _probe(self, endpoint: str) -> None:
        """Asks the endpoint who it is; a broken one over a new connection, without a backoff."""
        old = self._channels[endpoint]
        channel = self.connect(endpoint) if self.leader.is_broken(endpoint) else old
        try:
            await self.check(endpoint, channel)
        finally:
            if channel is not old:
                self._replace(endpoint, channel)

    async def check(self, endpoint: str, channel: grpc.aio.Channel) -> str:
        """Asks the endpoint over this channel whether it leads; "" if it does, else what it does.

        One without a health service is taken at its word when it is asked something.
        """
        asked_ns = self._clock_ns()
        try:
            health = channel.unary_unary(_HEALTH_CHECK, bytes, bytes)
            serving = await health(_HEALTH_QUESTION, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            found = self.problem(error)
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                found = ""
                self.leader.answers(endpoint, self._clock_ns())
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.leader.silent(endpoint, asked_ns)
            else:
                self.leader.lost(endpoint)
        else:
            found = "" if serving == _SERVING else "it does not lead"
            if found:
                self.leader.stands_by(endpoint, "", self._clock_ns())
            else:
                self.leader.claims(endpoint, self._clock_ns())
        self._note()
        return found

    def _replace(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        """Takes the new channel if it brought an answer; closes the other."""
        if not self.leader.is_broken(endpoint):
            channel, self._channels[endpoint] = self._channels[endpoint], channel
            self._stubs[endpoint] = _stub(self._channels[endpoint])
        task = asyncio.get_running_loop().create_task(channel.close(RETIRE_S))
        self._retiring[task] = channel
        task.add_done_callback(self._retiring.pop)


def error_info(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str]]:
    """Returns reason and metadata of a failed call's ErrorInfo, ("", {}) if it has none."""
    trailing = cast("Metadata", error.trailing_metadata() or ())
    details = cast("bytes", dict(trailing).get("grpc-status-details-bin", b""))
    info = error_details_pb2.ErrorInfo()
    with contextlib.suppress(DecodeError):  # Who knows who answered there.
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info):
                return info.reason, dict(info.metadata)
    return "", {}


def _stub(channel: grpc.aio.Channel) -> LeaseServiceAsyncStub:
    return cast("LeaseServiceAsyncStub", lease_pb2_grpc.LeaseServiceStub(channel))
