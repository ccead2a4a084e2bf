"""Stands for election in etcd: one of several lease services leads, the others stand by.

The leader is who created the leader key, on an etcd lease of the leadership TTL; the key holds its
address. A candidate looks at the key now and then and whenever a watch says that it changed. Only
the look decides, so a watch that is late or broken costs time alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvturn_lease.errors import NotLeader, StoreUnavailable
from kvturn_lease.etcd.client import created_at, delete, hangs_on, put, read
from kvturn_lease.etcd.errors import EtcdError, EtcdNoSpace, EtcdUnavailable, LeaseGone
from kvturn_lease.etcd_store import Fence
from kvturn_lease.leadership import Leadership
from kvturn_lease.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvturn.etcd.v3 import etcd_pb2
    from kvturn_lease.errors import LeaseServiceError
    from kvturn_lease.etcd.client import EtcdClient
    from kvturn_lease.outages import Outages

_SECOND_NS = 1_000_000_000
_RETRY_S = 0.2
_RESIGN_TIMEOUT_S = 0.5

logger = logging.getLogger("kvturn.election")


class Office(Protocol):
    """What a lease service does while it leads, and while it does not."""

    async def assume(self, fence: Fence, until_ns: int) -> None:
        """Begins a term that lasts until `until_ns`, or longer if extend() says so."""

    def extend(self, until_ns: int) -> bool:
        """Extends the term; False if it was over before."""

    async def vacate(self) -> None:
        """Ends the term, if one began: silent at once, then tidied up."""

    def stand_by(self, refusal: LeaseServiceError) -> None:
        """Says with which answer to refuse while another leads, or none is known."""


@dataclass(frozen=True, slots=True)
class _Term:
    fence: Fence
    leadership: Leadership = field(default_factory=Leadership)


class Election:
    """One candidate. `over` is to be set when the store finds that the term is over."""

    def __init__(
        self,
        client: EtcdClient,
        office: Office,
        outages: Outages,
        clock_ns: Callable[[], int],
        *,
        key: bytes,
        address: str,
        ttl_s: int,
        tally: Tally | None = None,
    ) -> None:
        """`key` is the leader key, `address` where clients reach us, `clock_ns` CLOCK_BOOTTIME.

        `tally` counts for all of the process; None: one of its own.
        """
        self._tally = Tally() if tally is None else tally
        self.over = asyncio.Event()
        self._client = client
        self._office = office
        self._outages = outages
        self._clock_ns = clock_ns
        self._key = key
        self._address = address
        self._ttl_s = ttl_s
        self._look_s = ttl_s / 3
        self._changed = asyncio.Event()
        self._leader: str | None = None
        self._lease_id = 0
        """The newest etcd lease of ours."""

    async def run(self) -> None:
        """Leads whenever it can, until cancelled; then it resigns, for another to lead at once."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                term = await self._win()
                await self._lead(term)
                # Who cannot read the records lets others try for a while, who perhaps can.
                unfit = self._outages.is_open("records")
                await asyncio.sleep(self._ttl_s if unfit else _RETRY_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    # ---- standing by ---------------------------------------------------------------------

    async def _win(self) -> _Term:
        """Stands by until elected."""
        while True:
            self._changed.clear()
            try:
                kv, _ = await self._client.get(self._key, 2 * self._look_s)
                if kv is not None and kv.lease == 0:
                    await self._clear(kv)
                    kv = None
                elif kv is not None and kv.lease == self._lease_id:
                    # Of a term of ours that ended while etcd was away: it need not run out.
                    await self._client.revoke(kv.lease, self._look_s)
                    kv = None
                term = await self._campaign() if kv is None else None
            except EtcdError as error:
                self._tally.elections["failed"] += 1
                self._tally.store_failures["elect"] += 1
                self._lose_sight(error)
                # What etcd refuses is asked for less often: a login is work for it.
                transient = isinstance(error, EtcdUnavailable)
                await asyncio.sleep(_RETRY_S if transient else self._look_s)
                continue
            self._outages.end("etcd", "etcd answers again")
            if term is not None:
                self._tally.elections["won"] += 1
                return term
            if kv is None:
                self._tally.elections["lost"] += 1
                continue  # another was faster; see who
            self._see(kv.value.decode(errors="replace"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._changed.wait()

    async def _clear(self, kv: etcd_pb2.KeyValue) -> None:
        """Deletes a key that would never run out: no leader's, but copied here without its lease.

        Raises EtcdError.
        """
        logger.warning("removing a leader key that hangs on no etcd lease")
        await self._client.transact(
            [created_at(self._key, kv.create_revision), hangs_on(self._key, 0)],
            [delete(self._key)],
            timeout_s=self._look_s,
            safe=True,
        )

    def _see(self, leader: str) -> None:
        if leader != self._leader:
            self._leader = leader
            logger.info("standing by: %s leads", leader)
        # Under our own address an earlier process of ours led; nobody finds a leader there now.
        self._office.stand_by(NotLeader("" if leader == self._address else leader))

    def _lose_sight(self, error: EtcdError) -> None:
        self._leader = None
        if isinstance(error, EtcdNoSpace):
            text = "etcd is out of space: no lease service can be elected (etcdctl alarm disarm)"
        elif isinstance(error, EtcdUnavailable):
            text = f"etcd does not answer, so nobody can be elected: {error}"
        else:
            text = f"etcd refuses us, so we cannot be elected: {error}"
        self._outages.begin("etcd", text)
        self._office.stand_by(StoreUnavailable())

    async def _campaign(self) -> _Term | None:
        """Creates the leader key if there is none; None if another did. Raises EtcdError."""
        lease_id = self._lease_id = secrets.randbits(62) + 1
        sent_ns = self._clock_ns()
        granted_s = await self._client.grant(lease_id, self._ttl_s, self._look_s)
        try:
            response = await self._client.transact(
                [created_at(self._key, 0)],
                [put(self._key, self._address.encode(), lease_id)],
                [read(self._key)],
                timeout_s=self._look_s,
                safe=True,  # who finds the key on its own lease has won by an earlier try
            )
        except EtcdError:
            await self._resign(lease_id)
            raise
        revision = response.header.revision
        if not response.succeeded:
            kvs = response.responses[0].response_range.kvs
            if not kvs or kvs[0].lease != lease_id:
                await self._resign(lease_id)
                return None
            revision = kvs[0].create_revision
        term = _Term(Fence(self._key, revision, lease_id))
        term.leadership.acknowledge(sent_ns, granted_s)
        return term

    async def _watch(self) -> None:
        """Notes changes of the leader key, for as long as this process lives."""
        while True:
            with contextlib.suppress(EtcdError):
                _, revision = await self._client.get(self._key, self._look_s)
                watch = self._client.watch(self._key, revision + 1)
                async with contextlib.aclosing(watch) as batches:
                    async for _ in batches:
                        self._changed.set()
            await asyncio.sleep(self._look_s)

    # ---- leading -------------------------------------------------------------------------

    async def _lead(self, term: _Term) -> None:
        """Leads until the term is over."""
        self._leader = None
        self.over.clear()
        assuming = asyncio.create_task(self._office.assume(term.fence, term.leadership.until_ns))
        reason = "it was told to stop"
        try:
            reason = await self._hold(term, assuming)
        finally:
            leaving = asyncio.create_task(self._leave(term, assuming, reason))
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:  # told to stop meanwhile: it is tidied up all the same
                await leaving
                raise

    async def _leave(self, term: _Term, assuming: asyncio.Task[None], reason: str) -> None:
        assuming.cancel()
        await asyncio.gather(assuming, return_exceptions=True)
        await self._office.vacate()
        if reason:
            logger.warning("no longer leading: %s", reason)
        else:
            self._office.stand_by(StoreUnavailable())
        await self._resign(term.fence.lease_id)

    async def _hold(self, term: _Term, assuming: asyncio.Task[None]) -> str:
        """Keeps the term alive for as long as etcd lets it.

        Returns why it is over; empty if it never began, because the records cannot be read.
        """
        leadership = term.leadership
        while True:
            await self._pause(leadership.renew_ns)
            if self.over.is_set():
                return "etcd has another leader key"
            if assuming.done():
                problem = assuming.exception()
                if isinstance(problem, EtcdUnavailable):
                    return f"the records could not be read: {problem}"
                if problem is not None:
                    text = f"the records in etcd cannot be read, so we cannot lead: {problem}"
                    self._outages.begin("records", text)
                    return ""
                self._outages.end("records", "the records in etcd can be read again")
            sent_ns = self._clock_ns()
            if not leadership.leads(sent_ns):
                return "etcd did not renew the leadership in time"
            try:
                granted_s = await self._renew(term, leadership.until_ns - sent_ns)
            except LeaseGone:
                return "the leadership's etcd lease has ended"
            except EtcdError as error:
                self._tally.store_failures["renew"] += 1
                self._outages.begin("etcd", f"etcd does not renew the leadership: {error}")
                await asyncio.sleep(_RETRY_S)
                continue
            self._outages.end("etcd", "etcd answers again")
            self._tally.renewal.observe((self._clock_ns() - sent_ns) / _SECOND_NS)
            leadership.acknowledge(sent_ns, granted_s)
            if not self._office.extend(leadership.until_ns):
                return "it was not renewed in time"

    async def _renew(self, term: _Term, left_ns: int) -> int:
        """Renews the lease and looks whether the key is still ours; returns seconds granted."""
        timeout_s, fence = left_ns / _SECOND_NS, term.fence
        granted_s, (kv, _) = await asyncio.gather(
            self._client.renew(fence.lease_id, timeout_s), self._client.get(fence.key, timeout_s)
        )
        if kv is None or (kv.create_revision, kv.lease) != (fence.create_revision, fence.lease_id):
            raise LeaseGone("the leader key is gone")
        return granted_s

    async def _pause(self, until_ns: int) -> None:
        """Waits until then, or until the store finds that the term is over."""
        left_s = max(0, until_ns - self._clock_ns()) / _SECOND_NS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self.over.wait()

    async def _resign(self, lease_id: int) -> None:
        with contextlib.suppress(EtcdError):  # then it runs out
            await self._client.revoke(lease_id, _RESIGN_TIMEOUT_S)
