"""Keepalives of any number of etcd leases over one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from grpc.aio import AioRpcError, UsageError

from kvturn.etcd.v3 import etcd_pb2
from kvturn_lease.etcd.connection import Method, Patience
from kvturn_lease.etcd.errors import EtcdError, EtcdUnavailable, LeaseGone, LoginNeeded

if TYPE_CHECKING:
    from kvturn_lease.etcd.connection import Connection, Stream

LEASE_KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    etcd_pb2.LeaseKeepAliveRequest,
    etcd_pb2.LeaseKeepAliveResponse,
)


class KeepAlives:
    """Renews leases; opens its stream when needed, anew when it broke or stays silent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._line: _Line | None = None
        self._opening = asyncio.Lock()

    async def renew(self, lease_id: int, timeout_s: float) -> int:
        """Renews a lease; returns the seconds that etcd granted, from after this call began.

        Raises LeaseGone, or EtcdUnavailable after `timeout_s` at the latest.
        """
        patience = Patience(timeout_s, self._connection.endpoint_count)
        logins = 0
        while True:
            try_s = patience.try_s()
            endpoint = self._connection.endpoint
            try:
                async with asyncio.timeout(try_s):
                    line = await self._open_line()
                    endpoint = line.stream.endpoint
                    ttl_s = await line.ask(lease_id)
            except (TimeoutError, EtcdUnavailable) as error:
                self._hang_up(endpoint)
                self._connection.leave(endpoint)
                await patience.pause(EtcdUnavailable(str(error) or "no answer in time"))
            except LoginNeeded:
                logins += 1
                if logins > 1:
                    raise
            else:
                if ttl_s <= 0:
                    raise LeaseGone("the etcd lease is gone")
                return ttl_s

    async def close(self) -> None:
        """Ends the stream."""
        if self._line is not None:
            self._line.hang_up()
            self._line = None

    async def _open_line(self) -> _Line:
        async with self._opening:
            if self._line is None or self._line.broken:
                stream = await self._connection.open(LEASE_KEEP_ALIVE)
                self._line = _Line(self._connection, stream)
            return self._line

    def _hang_up(self, endpoint: int) -> None:
        if self._line is not None and self._line.stream.endpoint == endpoint:
            self._line.hang_up()
            self._line = None


class _Line:
    """One stream, and who waits on it."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self.stream = stream
        self.broken = False
        self._connection = connection
        # etcd answers the requests of one lease in order. One that gave up stays in line, so that
        # the answer to it is never taken for the answer to a later request.
        self._waiting: dict[int, deque[asyncio.Future[int]]] = {}
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def ask(self, lease_id: int) -> int:
        """Returns the seconds granted, 0 or less for a lease that is gone."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with self._writing:
            if self.broken:
                raise EtcdUnavailable("the keepalive stream broke")
            self._waiting.setdefault(lease_id, deque()).append(future)
            try:
                await self.stream.call.write(etcd_pb2.LeaseKeepAliveRequest(id=lease_id))
            except (AioRpcError, UsageError, asyncio.InvalidStateError):
                raise EtcdUnavailable("the keepalive stream broke") from None
        return await future

    def hang_up(self) -> None:
        """Ends the stream; whoever waits asks on another."""
        self.broken = True
        self._reader.cancel()
        self.stream.call.cancel()
        self._fail(EtcdUnavailable("the keepalive stream was given up"))

    async def _read(self) -> None:
        try:
            while True:
                response = await self._connection.read_from(self.stream)
                waiting = self._waiting.get(response.id)
                if not waiting:
                    continue
                future = waiting.popleft()
                if not waiting:
                    del self._waiting[response.id]
                if not future.done():
                    future.set_result(response.ttl)
        except EtcdError as error:
            self._fail(error)
        finally:  # also when a write that was cancelled has ended the call
            self.broken = True
            self._fail(EtcdUnavailable("the keepalive stream broke"))

    def _fail(self, error: EtcdError) -> None:
        waiting, self._waiting = self._waiting, {}
        for futures in waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # nobody may be waiting any more
