"""The etcd client: the few calls that the store and the election make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvturn.etcd.v3 import etcd_pb2
from kvturn_lease.etcd.connection import Connection, Method
from kvturn_lease.etcd.errors import LeaseExists, LeaseGone
from kvturn_lease.etcd.keepalive import KeepAlives
from kvturn_lease.etcd.watch import watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kvturn_lease.etcd.config import EtcdConfig

RANGE = Method("/etcdserverpb.KV/Range", etcd_pb2.RangeRequest, etcd_pb2.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", etcd_pb2.TxnRequest, etcd_pb2.TxnResponse)
COMPACT = Method(
    "/etcdserverpb.KV/Compact", etcd_pb2.CompactionRequest, etcd_pb2.CompactionResponse
)
LEASE_GRANT = Method(
    "/etcdserverpb.Lease/LeaseGrant", etcd_pb2.LeaseGrantRequest, etcd_pb2.LeaseGrantResponse
)
LEASE_REVOKE = Method(
    "/etcdserverpb.Lease/LeaseRevoke", etcd_pb2.LeaseRevokeRequest, etcd_pb2.LeaseRevokeResponse
)
PAGE_KEYS = 1_000


class EtcdClient:
    """One cluster's client; every call ends within its `timeout_s` and raises EtcdError."""

    def __init__(self, config: EtcdConfig) -> None:
        """Connects with the first call. Raises OSError for certificates that cannot be read."""
        self._connection = Connection(config)
        self._keep_alives = KeepAlives(self._connection)

    async def close(self) -> None:
        """Ends all calls and streams."""
        await self._keep_alives.close()
        await self._connection.close()

    async def get(self, key: bytes, timeout_s: float) -> tuple[etcd_pb2.KeyValue | None, int]:
        """Returns a key, None if it does not exist, and the store's revision."""
        request = etcd_pb2.RangeRequest(key=key)
        response = await self._connection.call(RANGE, request, timeout_s, safe=True)
        return (response.kvs[0] if response.kvs else None), response.header.revision

    async def list_prefix(
        self, prefix: bytes, timeout_s: float, page_keys: int = PAGE_KEYS, after: bytes = b""
    ) -> AsyncGenerator[tuple[Sequence[etcd_pb2.KeyValue], int], None]:
        """Yields all keys with the prefix in pages, and the one revision they were read at.

        A watch from that revision + 1 on misses nothing. `timeout_s` is for each page. With
        `after`, a key of the prefix, only those that follow it.
        """
        key, end, revision = after + b"\0" if after else prefix, prefix_end(prefix), 0
        while True:
            request = etcd_pb2.RangeRequest(
                key=key, range_end=end, limit=page_keys, revision=revision
            )
            response = await self._connection.call(RANGE, request, timeout_s, safe=True)
            revision = revision or response.header.revision
            yield response.kvs, revision
            if not response.more:
                return
            key = response.kvs[-1].key + b"\0"

    async def transact(
        self,
        compare: Sequence[etcd_pb2.Compare],
        success: Sequence[etcd_pb2.RequestOp],
        failure: Sequence[etcd_pb2.RequestOp] = (),
        *,
        timeout_s: float,
        safe: bool,
    ) -> etcd_pb2.TxnResponse:
        """Applies a transaction; `safe` says that its conditions make a repetition harmless."""
        request = etcd_pb2.TxnRequest(compare=compare, success=success, failure=failure)
        return await self._connection.call(TXN, request, timeout_s, safe=safe)

    async def grant(self, lease_id: int, ttl_s: int, timeout_s: float) -> int:
        """Makes a lease under an id chosen at random; returns the seconds that etcd granted."""
        request = etcd_pb2.LeaseGrantRequest(id=lease_id, ttl=ttl_s)
        try:
            response = await self._connection.call(LEASE_GRANT, request, timeout_s, safe=True)
        except LeaseExists:  # by an earlier try whose answer was lost
            return ttl_s
        return response.ttl

    async def renew(self, lease_id: int, timeout_s: float) -> int:
        """Renews a lease; returns the seconds granted. Raises LeaseGone."""
        return await self._keep_alives.renew(lease_id, timeout_s)

    async def revoke(self, lease_id: int, timeout_s: float) -> None:
        """Ends a lease and deletes its keys; fine if it is gone."""
        request = etcd_pb2.LeaseRevokeRequest(id=lease_id)
        try:
            await self._connection.call(LEASE_REVOKE, request, timeout_s, safe=True)
        except LeaseGone:
            return

    async def compact(self, revision: int, timeout_s: float) -> None:
        """Lets etcd forget what is older than `revision`."""
        request = etcd_pb2.CompactionRequest(revision=revision)
        await self._connection.call(COMPACT, request, timeout_s, safe=False)

    def watch(
        self, key: bytes, revision: int, range_end: bytes = b""
    ) -> AsyncGenerator[list[etcd_pb2.Event], None]:
        """Yields the changes from `revision` on; see watch.watch()."""
        return watch(self._connection, key, range_end, revision)


def prefix_end(prefix: bytes) -> bytes:
    """Returns the key after the last one with the prefix, which must not end in 0xff."""
    assert prefix
    assert prefix[-1] < 0xFF
    return prefix[:-1] + bytes([prefix[-1] + 1])


def created_at(key: bytes, revision: int) -> etcd_pb2.Compare:
    """Returns the condition that the key was created at this revision; 0: does not exist."""
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.COMPARE_RESULT_EQUAL,
        target=etcd_pb2.Compare.COMPARE_TARGET_CREATE,
        key=key,
        create_revision=revision,
    )


def hangs_on(key: bytes, lease_id: int) -> etcd_pb2.Compare:
    """Returns the condition that the key exists and is attached to this lease."""
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.COMPARE_RESULT_EQUAL,
        target=etcd_pb2.Compare.COMPARE_TARGET_LEASE,
        key=key,
        lease=lease_id,
    )


def put(key: bytes, value: bytes, lease_id: int, *, prev_kv: bool = False) -> etcd_pb2.RequestOp:
    """Returns the operation that sets a key."""
    request = etcd_pb2.PutRequest(key=key, value=value, lease=lease_id, prev_kv=prev_kv)
    return etcd_pb2.RequestOp(request_put=request)


def delete(key: bytes, range_end: bytes = b"", *, prev_kv: bool = False) -> etcd_pb2.RequestOp:
    """Returns the operation that deletes a key, or all up to `range_end`."""
    request = etcd_pb2.DeleteRangeRequest(key=key, range_end=range_end, prev_kv=prev_kv)
    return etcd_pb2.RequestOp(request_delete_range=request)


def read(key: bytes) -> etcd_pb2.RequestOp:
    """Returns the operation that reads a key."""
    return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key))
