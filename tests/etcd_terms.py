"""Terms of leadership for tests of the etcd store: a leader key, and the store it fences."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Self

from kvturn_lease.etcd.client import EtcdClient, delete, put
from kvturn_lease.etcd.config import EtcdConfig
from kvturn_lease.etcd_leases import EtcdLeases
from kvturn_lease.etcd_records import Keys
from kvturn_lease.etcd_store import EtcdStore, Fence
from kvturn_lease.outages import Outages

if TYPE_CHECKING:
    from types import TracebackType

    from kvturn_lease.store import Snapshot

T = 20.0


class EtcdTerms:
    """Begins one term after the other; the leader key is put by hand."""

    def __init__(
        self,
        *endpoints: str,
        ttl_s: int = 60,
        records_per_lease_max: int = 1_000,
        conversations_max: int = 100_000,
        waiting_max: int = 131_072,
        timeout_s: float = 2.0,
        secret: bytes = b"cluster secret",
    ) -> None:
        self.client = EtcdClient(EtcdConfig(endpoints=endpoints))
        self.secret = secret
        self.fenced = 0
        """How many terms learned from etcd that they were over."""
        self.leases: EtcdLeases
        self._ttl_s = ttl_s
        self._records_per_lease_max = records_per_lease_max
        self._conversations_max = conversations_max
        self._waiting_max = waiting_max
        self._timeout_s = timeout_s
        self._store: EtcdStore | None = None

    @property
    def keys(self) -> Keys:
        return Keys("test/", self.secret)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._store is not None:
            await self._store.close()
        await self.client.close()

    async def begin(self) -> tuple[EtcdStore, Snapshot]:
        """Ends the term before, once etcd has all that it recorded, and begins the next."""
        if self._store is not None:
            async with asyncio.timeout(20):
                await self._store.settled()
            await self._store.close()
        await self.depose()
        self.leases = EtcdLeases(self._ttl_s, self._records_per_lease_max)
        store = EtcdStore(
            self.client,
            self.keys,
            await self._lead(),
            self.leases,
            Outages(logging.getLogger("test")),
            conversations_max=self._conversations_max,
            on_fenced=self._count_fenced,
            waiting_max=self._waiting_max,
            timeout_s=self._timeout_s,
        )
        self._store = store
        return store, await store.load()

    async def depose(self) -> None:
        """Removes the leader key, as when its lease runs out."""
        await self.client.transact([], [delete(self.keys.leader)], timeout_s=T, safe=True)

    async def settled(self, store: EtcdStore) -> None:
        """Waits until all that was recorded is in etcd."""
        await asyncio.wait_for(store.settled(), T)

    async def revision(self) -> int:
        """Returns etcd's revision."""
        return (await self.client.get(b"none", T))[1]

    async def keys_in_etcd(self) -> dict[bytes, tuple[bytes, int]]:
        """Returns value and lease of each key but the leader's."""
        found = {}
        async for kvs, _ in self.client.list_prefix(b"test/", T):
            found.update({kv.key: (kv.value, kv.lease) for kv in kvs})
        found.pop(self.keys.leader, None)
        return found

    async def _lead(self) -> Fence:
        key = self.keys.leader
        value = secrets.token_hex(4).encode()
        lease_id = secrets.randbits(62) + 1
        await self.client.grant(lease_id, 3_600, T)
        await self.client.transact([], [put(key, value, lease_id)], timeout_s=T, safe=True)
        kv, _ = await self.client.get(key, T)
        assert kv is not None
        return Fence(key, kv.create_revision, lease_id)

    def _count_fenced(self) -> None:
        self.fenced += 1
