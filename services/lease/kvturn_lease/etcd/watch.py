"""A watch that loses no event: it goes on after the last event it told, wherever it can."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from grpc.aio import AioRpcError, UsageError

from kvturn.etcd.v3 import etcd_pb2
from kvturn_lease.etcd.connection import PAUSE_S_MAX, PAUSE_S_MIN, Method
from kvturn_lease.etcd.errors import EtcdUnavailable, LoginNeeded, WatchEnded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvturn_lease.etcd.connection import Connection, Stream

WATCH = Method("/etcdserverpb.Watch/Watch", etcd_pb2.WatchRequest, etcd_pb2.WatchResponse)
_LOGINS_MAX = 3
# etcd says the latter to a token that it does not know, too.
_LOGIN_WORDS = ("auth token", "permission denied")


async def watch(
    connection: Connection, key: bytes, range_end: bytes, revision: int
) -> AsyncGenerator[list[etcd_pb2.Event], None]:
    """Yields the changes from `revision` on, in order, whole transactions at a time.

    It resumes by itself after outages, on another endpoint if there is one. Raises WatchEnded
    when etcd no longer has what came next (compaction, other data) or ends it; then list again.
    """
    pause_s, logins = PAUSE_S_MIN, 0
    while True:
        endpoint = connection.endpoint
        try:
            stream = await connection.open(WATCH)
            endpoint = stream.endpoint
            read = _read(connection, stream, key, range_end, revision)
            async with contextlib.aclosing(read) as batches:
                async for next_revision, events in batches:
                    revision = next_revision
                    pause_s, logins = PAUSE_S_MIN, 0
                    if events:
                        yield events
        except EtcdUnavailable:
            connection.leave(endpoint)
        except LoginNeeded as error:
            logins += 1
            if logins > _LOGINS_MAX:
                raise WatchEnded(str(error)) from None
            connection.forget_login()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


async def _read(
    connection: Connection, stream: Stream, key: bytes, range_end: bytes, revision: int
) -> AsyncGenerator[tuple[int, list[etcd_pb2.Event]], None]:
    """Yields the revision to go on from, and the events before it, of one stream."""
    create = etcd_pb2.WatchCreateRequest(
        key=key,
        range_end=range_end,
        start_revision=revision,
        progress_notify=True,
        fragment=True,
    )
    try:
        try:
            await stream.call.write(etcd_pb2.WatchRequest(create_request=create))
        except (AioRpcError, UsageError, asyncio.InvalidStateError):
            raise EtcdUnavailable("the watch stream broke") from None
        async for batch in _batches(connection, stream, revision):
            yield batch
    finally:
        stream.call.cancel()


async def _batches(
    connection: Connection, stream: Stream, revision: int
) -> AsyncGenerator[tuple[int, list[etcd_pb2.Event]], None]:
    gathered: list[etcd_pb2.Event] = []
    while True:
        response: etcd_pb2.WatchResponse = await connection.read_from(stream)
        if response.canceled:
            if any(word in response.cancel_reason for word in _LOGIN_WORDS):
                raise LoginNeeded(response.cancel_reason)
            compacted = "compacted" if response.compact_revision else "etcd ended the watch"
            raise WatchEnded(response.cancel_reason or compacted)
        if response.created:
            # Not a revision to go on from: it is the store's, events before it are still to come.
            if response.header.revision < revision - 1:
                raise WatchEnded("etcd's data is older than what the watch has seen")
            continue
        # A transaction of many changes comes in fragments; half of it is no place to go on from.
        gathered.extend(response.events)
        if response.fragment:
            continue
        events, gathered = gathered, []
        last = events[-1].kv.mod_revision if events else response.header.revision
        revision = max(revision, last + 1)
        yield revision, events
