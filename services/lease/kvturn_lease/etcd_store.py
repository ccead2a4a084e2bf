"""Records in etcd, for one term of leadership.

Written behind: `record` notes what each key is to hold, one task brings it to etcd in
transactions that apply only while this term's leader key stands, so a deposed leader changes
nothing. What waits is bounded and coalesced by key; what etcd does not take is dropped, because
a record that is missing only makes a verdict know less.

All records hang on leases of their engine (etcd_leases.py); what etcd holds is bounded by the
engines that live and the conversations that are remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvturn_lease.etcd.client import created_at, delete, hangs_on, prefix_end, put
from kvturn_lease.etcd.errors import EtcdError, EtcdNoSpace, EtcdUnavailable, LeaseGone
from kvturn_lease.etcd_records import (
    conversation_record,
    conversation_value,
    session_record,
    session_value,
)
from kvturn_lease.store import (
    ConversationChanged,
    ConversationForgotten,
    EngineForgotten,
    SessionClosed,
    SessionKept,
    SessionOpened,
    Snapshot,
)
from kvturn_lease.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvturn.etcd.v3 import etcd_pb2
    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.etcd.client import EtcdClient
    from kvturn_lease.etcd_leases import EtcdLeases
    from kvturn_lease.etcd_records import Keys
    from kvturn_lease.outages import Outages
    from kvturn_lease.store import Change, ConversationRecord, SessionRecord

OPERATIONS_MAX = 128
"""etcd's own limit of one transaction."""
WAITING_MAX = 131_072
"""Conversations whose records wait for etcd; changes of more are dropped."""
_TIMEOUT_S = 2.0
_PAUSE_S_MIN = 0.1
_PAUSE_S_MAX = 1.0
_RENEWALS_AT_ONCE = 64
_PAGE_KEYS = 2_000  # few pages, because for each etcd counts all keys that follow
_KEYS_PER_STEP = 200  # some 2 ms of work; questions wait no longer for it
_CLOSE_S = 0.5
_ENTRIES_KEPT = 4_096

logger = logging.getLogger("kvturn.store")


@dataclass(frozen=True, slots=True)
class Fence:
    """What proves a term of leadership: the leader key, as it was created on this lease.

    The lease's id is random, so that it is not mistaken either after etcd lost its data.
    """

    key: bytes
    create_revision: int
    lease_id: int

    def conditions(self) -> list[etcd_pb2.Compare]:
        """Returns what holds in etcd for as long as the term lasts."""
        return [created_at(self.key, self.create_revision), hangs_on(self.key, self.lease_id)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a key is to hold."""

    engine_id: str
    value: bytes | None
    """None: nothing."""


_NOTHING = _Entry("", None)


@functools.lru_cache(maxsize=_ENTRIES_KEPT)
def _entry_of(record: ConversationRecord) -> _Entry:
    """Returns the entry of a conversation; those of an engine are few and share it."""
    return _Entry(record.engine_id, conversation_value(record))


class Recollection:
    """What was recorded of conversations; it fills while the leader is already at work."""

    def __init__(self, keys: Keys, conversations_max: int) -> None:
        self._keys = keys
        self._max = conversations_max
        self._records: dict[bytes, ConversationRecord] = {}

    def get(self, key: ConversationKey) -> ConversationRecord | None:
        """Returns what was recorded of a conversation, None if nothing or not yet known."""
        return self._records.get(self._keys.tag(key)) if self._records else None

    def forget(self, key: ConversationKey) -> None:
        """Drops what a newer record replaced."""
        if self._records:
            self._records.pop(self._keys.tag(key), None)

    def add(self, tag: bytes, record: ConversationRecord) -> bool:
        """Takes a record; False if there are too many."""
        if tag not in self._records and len(self._records) >= self._max:
            return False
        self._records[tag] = record
        return True


class EtcdStore:
    """Keeps records in etcd while `fence` holds."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        fence: Fence,
        leases: EtcdLeases,
        outages: Outages,
        *,
        conversations_max: int,
        on_fenced: Callable[[], None],
        waiting_max: int = WAITING_MAX,
        timeout_s: float = _TIMEOUT_S,
        tally: Tally | None = None,
    ) -> None:
        """`on_fenced` is called once when etcd shows that the term is over.

        `tally` counts for all terms of the process; None: one of its own.
        """
        self._tally = Tally() if tally is None else tally
        self._client = client
        self._keys = keys
        self._fence = fence.conditions()
        self._begun_revision = fence.create_revision
        self._leases = leases
        self._outages = outages
        self._on_fenced = on_fenced
        self._waiting_max = waiting_max
        self._timeout_s = timeout_s
        self._recollection = Recollection(keys, conversations_max)
        self._recalled_key = b""
        """The last conversation's key that was taken over; they come in order."""
        self._sessions: dict[str, bytes] = {}
        """Values by engine id, to put them again should their lease be lost."""
        self._waiting: dict[bytes, _Entry] = {}
        self._renewing: dict[str, None] = {}
        self._revoking: dict[int, None] = {}
        self._wake_writer, self._wake_keeper = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the seam ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Records that etcd does not have yet."""
        return len(self._waiting)

    async def load(self) -> Snapshot:
        """Reads the sessions now and the conversations behind. Raises EtcdError."""
        sessions: dict[str, SessionRecord] = {}
        pages = self._client.list_prefix(self._keys.sessions, self._timeout_s)
        async with contextlib.aclosing(pages):
            async for kvs, _ in pages:
                for kv in kvs:
                    record = session_record(kv.value)
                    if record is not None:
                        sessions[record.engine_id] = record
                        self._sessions[record.engine_id] = kv.value
                        self._adopt(record.engine_id, kv.lease)
        for work in (self._recall(), self._write(), self._keep()):
            self._tasks.append(asyncio.create_task(work))
        return Snapshot(sessions, self._recollection)

    def record(self, changes: Sequence[Change]) -> None:
        """Notes the changes for the writer."""
        for change in changes:
            match change:
                case SessionKept(engine_id):
                    if self._leases.is_due(engine_id, time.monotonic()):
                        self._renewing[engine_id] = None
                        self._wake_keeper.set()
                case SessionOpened(record):
                    self._sessions[record.engine_id] = session_value(record)
                    self._put_session(record.engine_id)
                case EngineForgotten(engine_id):
                    self._sessions.pop(engine_id, None)
                    self._put_session(engine_id)
                    self._revoking.update(dict.fromkeys(self._leases.forget(engine_id)))
                    self._wake_keeper.set()
                case ConversationChanged(key, conversation):
                    self._recollection.forget(key)
                    self._note(self._keys.conversation(key), _entry_of(conversation))
                case ConversationForgotten(key):
                    self._recollection.forget(key)
                    self._note(self._keys.conversation(key), _NOTHING)
                case SessionClosed():
                    pass  # its leases run out unless it comes back

    async def close(self) -> None:
        """Gives pending changes half a second, and ends."""
        if self._tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self.settled()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Returns once etcd has all that was recorded."""
        await self._idle.wait()

    # ---- what waits ----------------------------------------------------------------------

    def _put_session(self, engine_id: str) -> None:
        entry = _Entry(engine_id, self._sessions.get(engine_id))
        self._waiting[self._keys.session(engine_id)] = entry
        self._idle.clear()
        self._wake_writer.set()

    def _note(self, key: bytes, entry: _Entry) -> None:
        if key not in self._waiting and len(self._waiting) >= self._waiting_max:
            self._outages.begin("behind", "etcd is slow: dropping records of conversations")
            self._tally.records_dropped += 1
            return
        self._waiting[key] = entry
        self._idle.clear()
        self._wake_writer.set()

    def _take(self) -> dict[bytes, _Entry]:
        """Returns the next batch, the longest waiting first."""
        batch = {}
        for key in self._waiting:
            batch[key] = self._waiting[key]
            if len(batch) == OPERATIONS_MAX:
                break
        for key in batch:
            del self._waiting[key]
        return batch

    def _put_back(self, batch: dict[bytes, _Entry]) -> None:
        """Lets a batch that was not applied wait again, but for what has changed since."""
        self._waiting = {**batch, **self._waiting}

    def _sessions_in(self, batch: dict[bytes, _Entry]) -> dict[bytes, _Entry]:
        return {key: batch[key] for key in batch if key.startswith(self._keys.sessions)}

    # ---- the writer ----------------------------------------------------------------------

    async def _write(self) -> None:
        pause_s = _PAUSE_S_MIN
        while True:
            batch = self._take()
            if not batch:
                self._idle.set()
                self._outages.end("behind", "etcd has caught up")
                self._wake_writer.clear()
                await self._wake_writer.wait()
                continue
            began_s = time.monotonic()
            try:
                applied = await self._apply(batch)
            except LeaseGone:
                self._put_back(batch)
                await self._find_lost_leases({entry.engine_id for entry in batch.values()})
                await asyncio.sleep(_PAUSE_S_MIN)
            except EtcdUnavailable:
                self._tally.store_failures["write"] += 1
                self._put_back(batch)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            except EtcdError as error:
                self._tally.store_failures["write"] += 1
                kept = self._sessions_in(batch)
                self._tally.records_dropped += len(batch) - len(kept)
                self._put_back(kept)
                self._say_refused(error)
                await asyncio.sleep(_PAUSE_S_MAX)
            else:
                if not applied:
                    self._waiting.clear()
                    self._idle.set()
                    self._on_fenced()
                    return
                pause_s = _PAUSE_S_MIN
                self._tally.store_write.observe(time.monotonic() - began_s)
                self._outages.end("space", "etcd takes records again")
                self._outages.end("refused", "etcd takes records again")

    def _say_refused(self, error: EtcdError) -> None:
        if isinstance(error, EtcdNoSpace):
            self._outages.begin(
                "space",
                "etcd is out of space: dropping records until there is room and its alarm is"
                " disarmed (etcdctl compact, defrag, alarm disarm)",
            )
        else:
            self._outages.begin("refused", f"etcd refuses records, dropping them: {error}")

    async def _apply(self, batch: dict[bytes, _Entry]) -> bool:
        """Applies a batch; False if the term is over. Raises EtcdError."""
        attached: list[int] = []
        operations: list[etcd_pb2.RequestOp] = []
        try:
            for key, entry in batch.items():
                if entry.value is None:
                    operations.append(delete(key, prev_kv=True))
                    continue
                lease_id = self._leases.room(entry.engine_id) or await self._grant(entry.engine_id)
                self._leases.attach(lease_id)
                attached.append(lease_id)
                operations.append(put(key, entry.value, lease_id, prev_kv=True))
            # The same operations again change nothing more, so that it is safe to repeat.
            response = await self._client.transact(
                self._fence, operations, timeout_s=self._timeout_s, safe=True
            )
        except EtcdError:
            for lease_id in attached:
                self._leases.detach(lease_id)
            raise
        for outcome in response.responses:
            if outcome.HasField("response_put"):
                self._leases.detach(outcome.response_put.prev_kv.lease)
            for kv in outcome.response_delete_range.prev_kvs:
                self._leases.detach(kv.lease)
        return response.succeeded

    async def _grant(self, engine_id: str) -> int:
        lease_id = secrets.randbits(62) + 1
        await self._client.grant(lease_id, self._leases.ttl_s, self._timeout_s)
        self._leases.add(engine_id, lease_id)
        return lease_id

    # ---- the leases ----------------------------------------------------------------------

    def _adopt(self, engine_id: str, lease_id: int) -> None:
        """Goes on with the lease that an earlier term hung a record on."""
        if lease_id:
            self._leases.add(engine_id, lease_id)
            self._leases.attach(lease_id)

    async def _find_lost_leases(self, engine_ids: set[str]) -> None:
        """Forgets those leases of the engines that etcd does not know any more."""
        for engine_id in engine_ids:
            with contextlib.suppress(EtcdError):
                await self._renew(engine_id)

    async def _keep(self) -> None:
        """Renews the leases of engines whose heartbeats came, and revokes those of the gone."""
        while True:
            await self._wake_keeper.wait()
            self._wake_keeper.clear()
            while self._renewing or self._revoking:
                engines = list(self._renewing)[:_RENEWALS_AT_ONCE]
                for engine_id in engines:
                    del self._renewing[engine_id]
                leases = list(self._revoking)[:_RENEWALS_AT_ONCE]
                for lease_id in leases:
                    del self._revoking[lease_id]
                await asyncio.gather(
                    *(self._renew_in_time(engine_id) for engine_id in engines),
                    *(self._revoke(lease_id) for lease_id in leases),
                )

    async def _renew_in_time(self, engine_id: str) -> None:
        try:
            await self._renew(engine_id)
        except EtcdError:
            self._leases.retry(engine_id, time.monotonic())

    async def _renew(self, engine_id: str) -> None:
        """Renews an engine's leases, and puts its session again if its lease was lost."""
        for lease_id in self._leases.of_engine(engine_id):
            try:
                await self._client.renew(lease_id, self._timeout_s)
            except LeaseGone:
                self._leases.drop(lease_id)
                if engine_id in self._sessions:
                    self._put_session(engine_id)

    async def _revoke(self, lease_id: int) -> None:
        with contextlib.suppress(EtcdError):  # then it runs out
            await self._client.revoke(lease_id, self._timeout_s)

    # ---- what an earlier term recorded ---------------------------------------------------

    async def _recall(self) -> None:
        """Reads the conversations; goes on where it was when etcd failed."""
        while True:
            try:
                await self._read_conversations()
                return
            except EtcdError:
                await asyncio.sleep(_PAUSE_S_MAX)

    async def _read_conversations(self) -> None:
        ours, every = self._keys.conversations, self._keys.any_conversations
        # Nobody knows any more what was recorded under another secret.
        others = [delete(every, ours), delete(prefix_end(ours), prefix_end(every))]
        await self._client.transact(self._fence, others, timeout_s=self._timeout_s, safe=True)
        pages = self._client.list_prefix(ours, self._timeout_s, _PAGE_KEYS, self._recalled_key)
        async with contextlib.aclosing(pages):
            async for kvs, _ in pages:
                for index, kv in enumerate(kvs):
                    self._take_over(kv)
                    self._recalled_key = kv.key
                    if index % _KEYS_PER_STEP == 0:
                        await asyncio.sleep(0)

    def _take_over(self, kv: etcd_pb2.KeyValue) -> None:
        if kv.mod_revision > self._begun_revision:
            return  # this term wrote it, and counted it
        tag, record = self._keys.tag_of(kv.key), conversation_record(kv.value)
        if record is not None:
            self._adopt(record.engine_id, kv.lease)
        if kv.key in self._waiting:
            return  # this term knows better
        if tag is None or record is None or not self._recollection.add(tag, record):
            self._note(kv.key, _NOTHING)
