"""The etcd store: what etcd holds, for how long, at what cost, and what an etcd that fails does."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
from etcd_server import EtcdServer, until
from etcd_terms import EtcdTerms

from kvturn_lease.config import LessorConfig
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.etcd.errors import EtcdUnavailable
from kvturn_lease.etcd_leases import EtcdLeases
from kvturn_lease.etcd_records import (
    Keys,
    conversation_record,
    session_record,
    session_value,
)
from kvturn_lease.lessor import Lessor
from kvturn_lease.store import (
    ConversationChanged,
    ConversationForgotten,
    ConversationRecord,
    EngineForgotten,
    SessionKept,
    SessionOpened,
    SessionRecord,
)
from kvturn_lease.verdict import ReleaseReason, Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from kvturn_lease.store import Snapshot

KEY = ConversationKey("tenant-name", "model-name", "conversation-name")
HELD = ConversationRecord("d1", ReleaseReason.NONE)


def key(number: int) -> ConversationKey:
    return KEY._replace(conversation_id=f"conversation-{number}")


def held(*numbers: int, engine_id: str = "d1") -> list[ConversationChanged]:
    record = ConversationRecord(engine_id, ReleaseReason.NONE)
    return [ConversationChanged(key(number), record) for number in numbers]


def known(snapshot: Snapshot) -> list[int]:
    return [number for number in range(10) if snapshot.conversations.get(key(number))]


def session(engine_id: str = "d1", number: int = 1) -> SessionOpened:
    return SessionOpened(SessionRecord(engine_id, f"inc-{engine_id}", number, ()))


# ---- what etcd holds -------------------------------------------------------------------------


@pytest.mark.parametrize("draining", [False, True])
def test_a_session_record_is_read_as_it_was_written(draining: bool) -> None:
    """An engine that drains does so under the next leader too."""
    record = SessionRecord("d1", "inc", 7, ("old", "older"), draining)
    assert session_record(session_value(record)) == record


async def test_etcd_learns_no_name_of_a_conversation(tmp_path: Path) -> None:
    """Keys are keyed hashes; another secret gives others; values hold engine and state alone."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session(), ConversationChanged(KEY, HELD)])
        await terms.settled(store)
        found = await terms.keys_in_etcd()
        values = sorted(value for value, _ in found.values())
        assert values == [
            b'{"engine":"d1","incarnation":"inc-d1","session":1,"fenced":[]}',
            b'{"engine":"d1","state":"held"}',
        ]
        assert all(lease for _, lease in found.values())
        for name in (*KEY, *(part.encode().hex() for part in KEY)):
            assert not any(name.encode() in each for each in found)
    ours, others = Keys("test/", b"secret"), Keys("test/", b"another")
    assert ours.tag(KEY) != others.tag(KEY)
    assert ours.conversations != others.conversations
    shifted = ConversationKey("tenant-namem", "odel-name", "conversation-name")
    assert ours.tag(KEY) != ours.tag(shifted)
    assert ours.tag_of(ours.conversation(KEY)) == ours.tag(KEY)


async def test_one_lease_per_engine_and_number_of_records(tmp_path: Path) -> None:
    """30 records of one engine at 10 to a lease, its session included, hang on 4 leases."""
    async with (
        EtcdServer(tmp_path) as etcd,
        EtcdTerms(etcd.endpoint, records_per_lease_max=10) as terms,
    ):
        store, _ = await terms.begin()
        store.record([session("d1"), session("d2"), *held(*range(30))])
        await terms.settled(store)
        found = await terms.keys_in_etcd()
        assert len({lease for _, lease in found.values()}) == 5
        assert len(terms.leases) == 5
        # Changes and moves to another engine make room where a record was.
        for _ in range(3):
            store.record(held(*range(30), engine_id="d2"))
            await terms.settled(store)
            store.record(held(*range(30)))
            await terms.settled(store)
        assert len(terms.leases) <= 8
        # The next term goes on with the same leases.
        store, snapshot = await terms.begin()
        await until(lambda: snapshot.conversations.get(key(29)))
        store.record([session("d1", 2), *held(30)])
        await terms.settled(store)
        assert len(terms.leases) <= 8


async def test_heartbeats_add_no_revision_and_keep_records_alive(tmp_path: Path) -> None:
    """The engine that heartbeats stays in etcd; the one that stopped goes."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint, ttl_s=2) as terms:
        store, _ = await terms.begin()
        store.record([session("d1"), session("d2"), *held(1), *held(2, engine_id="d2")])
        await terms.settled(store)
        revision = await terms.revision()

        async def only_one_is_left() -> bool:
            store.record([SessionKept("d1")] * 100)
            return len(await terms.keys_in_etcd()) == 2

        await until(only_one_is_left)
        assert await terms.revision() == revision + 1  # the end of d2's lease
        assert all(b"d1" in value for value, _ in (await terms.keys_in_etcd()).values())
        for _ in range(10):
            store.record([SessionKept("d1")] * 100)
            await asyncio.sleep(0)
        assert await terms.revision() == revision + 1


async def test_forgetting_deletes_at_once(tmp_path: Path) -> None:
    """A forgotten conversation leaves etcd, a forgotten engine with all that hung on it."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session("d1"), session("d2"), *held(1, 2, 3)])
        await terms.settled(store)
        store.record([ConversationForgotten(key(1))])
        await terms.settled(store)
        assert len(await terms.keys_in_etcd()) == 4
        store.record([EngineForgotten("d1")])

        async def only_the_other_is_left() -> bool:
            return list(await terms.keys_in_etcd()) == [terms.keys.session("d2")]

        await until(only_the_other_is_left)


async def test_what_cannot_be_used_is_deleted(tmp_path: Path) -> None:
    """Records under another secret, beyond the bound, or that nobody can read do not stay."""
    async with EtcdServer(tmp_path) as etcd:
        async with EtcdTerms(etcd.endpoint, secret=b"before") as terms:
            store, _ = await terms.begin()
            store.record([session(), *held(*range(300))])
        async with EtcdTerms(etcd.endpoint, conversations_max=10) as terms:
            store, _ = await terms.begin()

            async def only_the_session_is_left() -> bool:
                return list(await terms.keys_in_etcd()) == [terms.keys.session("d1")]

            await until(only_the_session_is_left)
            store.record(held(*range(20)))
            await terms.settled(store)
            await etcd.ctl("put", f"{terms.keys.conversations.decode()}nonsense", "x")
            await etcd.ctl("put", f"{terms.keys.sessions.decode()}nonsense", '{"engine":1}')
            await terms.begin()

            async def ten_are_left() -> bool:
                return len(await terms.keys_in_etcd()) == 12

            await until(ten_are_left)


@pytest.mark.parametrize(("conversations_max", "kept"), [(8, 8), (100, 10)])
async def test_a_recollection_that_etcd_interrupts_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversations_max: int, kept: int
) -> None:
    """A page that fails, also once the recollection is full, costs no record; none counts twice."""
    monkeypatch.setattr("kvturn_lease.etcd_store._PAGE_KEYS", 4)
    monkeypatch.setattr("kvturn_lease.etcd_store._PAUSE_S_MAX", 0.0)
    async with (
        EtcdServer(tmp_path) as etcd,
        EtcdTerms(
            etcd.endpoint, conversations_max=conversations_max, records_per_lease_max=12
        ) as terms,
    ):
        store, _ = await terms.begin()
        store.record([session(), *held(*range(10))])
        await terms.settled(store)
        list_prefix, pages = terms.client.list_prefix, 0

        async def third_fails(*arguments: Any) -> AsyncGenerator[Any, None]:
            nonlocal pages
            async for page in list_prefix(*arguments):
                pages += arguments[0] == terms.keys.conversations
                if pages == 3:
                    raise EtcdUnavailable("this page timed out")
                yield page

        monkeypatch.setattr(terms.client, "list_prefix", third_fails)
        _, snapshot = await terms.begin()
        await until(lambda: pages > 3 and len(known(snapshot)) == kept)
        monkeypatch.setattr(terms.client, "list_prefix", list_prefix)

        async def only_those_are_left() -> bool:
            return len(await terms.keys_in_etcd()) == kept + 1

        await until(only_those_are_left)
        # All hang on one lease, which takes twelve.
        assert terms.leases.room("d1") is not None
        _, snapshot = await terms.begin()
        await until(lambda: len(known(snapshot)) == kept)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"engine":"d1","state":"nonsense","session":"x"}',
        b'{"engine":"d1","state":1e999,"session":1e999,"incarnation":"i","fenced":[]}',
    ],
    ids=lambda value: value[:70].decode(errors="replace"),
)
def test_values_of_others_are_no_records(value: bytes) -> None:
    """What somebody else wrote there is not believed."""
    assert session_record(value) is None
    assert conversation_record(value) is None


# ---- what fails ------------------------------------------------------------------------------


async def test_a_deposed_leader_changes_nothing(tmp_path: Path) -> None:
    """Its transactions do not apply once its leader key is gone, or is another's."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session()])
        await terms.settled(store)
        await terms.depose()
        store.record([session("d1", 9), *held(1)])
        await until(lambda: terms.fenced == 1)
        assert list(await terms.keys_in_etcd()) == [terms.keys.session("d1")]
        _, snapshot = await terms.begin()
        store.record([session("d1", 10)])
        assert snapshot.sessions["d1"].session_number == 1
        assert terms.fenced == 1


async def test_a_wiped_etcd_ends_the_term(tmp_path: Path) -> None:
    """The leader key is gone with everything else."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session()])
        await terms.settled(store)
        etcd.kill()
        etcd.wipe()
        await etcd.start()
        store.record(held(1))
        await until(lambda: terms.fenced == 1)


async def test_changes_wait_for_an_etcd_that_is_down(tmp_path: Path) -> None:
    """It is killed under load and comes back: the newest of each record arrives."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint, timeout_s=0.1) as terms:
        store, _ = await terms.begin()
        store.record([session(), *held(*range(1_000))])
        etcd.kill()
        store.record([session("d1", 2), *held(*range(1_000, 2_000))])
        await etcd.start()  # which takes longer than a transaction waits
        await terms.settled(store)
        assert len(await terms.keys_in_etcd()) == 2_001
        assert terms.fenced == 0


async def test_a_dead_engine_does_not_look_alive_when_etcd_is_restarted(tmp_path: Path) -> None:
    """Restarts before a lease's end give it its full TTL again, so records of the dead outlast
    it; the next term learns from them who is fenced and what was lost, and trusts nobody."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint, ttl_s=2) as terms:
        store, _ = await terms.begin()
        store.record([session(), *held(1)])
        await terms.settled(store)
        ends_s = time.monotonic() + 2.5
        while time.monotonic() < ends_s:
            etcd.kill()
            await etcd.start()
        _, snapshot = await terms.begin()
        await until(lambda: snapshot.conversations.get(key(1)))
        lessor = Lessor(LessorConfig(), term=2)
        lessor.restore(snapshot, 0)
        assert lessor.list_engines(0) == []
        resolution = lessor.resolve(key(1), 0)
        assert (resolution.lease_id, resolution.verdict) == (None, Verdict.ENGINE_LOST)

        async def nothing_is_left() -> bool:
            return not await terms.keys_in_etcd()

        await until(nothing_is_left)


async def test_what_waits_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With etcd frozen changes beyond the bound are dropped, which is said once; sessions stay."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint, waiting_max=200) as terms:
        store, _ = await terms.begin()
        store.record([session()])
        await terms.settled(store)
        etcd.freeze()
        with caplog.at_level(logging.WARNING):
            for number in range(2_000):
                store.record(held(number))
            store.record([session("d2")])
            etcd.resume()
            await terms.settled(store)
        assert [each.message for each in caplog.records] == [
            "etcd is slow: dropping records of conversations",
            "etcd has caught up",
        ]
        assert len(await terms.keys_in_etcd()) == 202
        store.record(held(2_001))
        await terms.settled(store)
        assert len(await terms.keys_in_etcd()) == 203


async def test_an_etcd_without_space_costs_records_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records are dropped, keepalives go on; with room again records are taken again."""
    quota = ("--quota-backend-bytes", str(1024 * 1024))
    async with EtcdServer(tmp_path, *quota) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session()])
        await terms.settled(store)
        await etcd.fill()
        with caplog.at_level(logging.WARNING):
            store.record(held(1))
            await terms.settled(store)
            store.record([SessionKept("d1"), *held(2)])
            await terms.settled(store)
            assert len(await terms.keys_in_etcd()) == 1
            revision = await terms.revision()
            await etcd.ctl("compact", str(revision))
            await etcd.ctl("del", "filler", "--prefix", ok=False)
            await terms.client.compact(await terms.revision(), 5)
            await etcd.ctl("defrag")
            await etcd.ctl("alarm", "disarm")
            store.record(held(3))
            await terms.settled(store)
        assert len(await terms.keys_in_etcd()) == 2
        assert len(caplog.records) == 2
        assert "out of space" in caplog.records[0].message
        assert "again" in caplog.records[1].message
        assert terms.fenced == 0


async def test_a_lease_that_etcd_lost_is_replaced(tmp_path: Path) -> None:
    """Somebody revokes an engine's lease: its session is put again, and new records too."""
    async with EtcdServer(tmp_path) as etcd, EtcdTerms(etcd.endpoint) as terms:
        store, _ = await terms.begin()
        store.record([session()])
        await terms.settled(store)
        (lease,) = terms.leases.of_engine("d1")
        await terms.client.revoke(lease, 5)
        store.record([SessionKept("d1")])

        async def session_is_back() -> bool:
            return len(await terms.keys_in_etcd()) == 1

        await until(session_is_back)
        (lease,) = terms.leases.of_engine("d1")
        await terms.client.revoke(lease, 5)
        store.record(held(1))

        async def both_are_there() -> bool:
            return len(await terms.keys_in_etcd()) == 2

        await until(both_are_there)


def test_renewals_are_due_once_in_a_third_of_the_ttl() -> None:
    """However often heartbeats come; sooner again after one that failed."""
    leases = EtcdLeases(ttl_s=30)
    assert not leases.is_due("d1", 0.0)  # has nothing in etcd
    leases.add("d1", 7)
    due = [now_s for now_s in range(60) if leases.is_due("d1", float(now_s))]
    assert due == [0, 10, 20, 30, 40, 50]
    leases.retry("d1", 50.0)
    assert not leases.is_due("d1", 50.4)
    assert leases.is_due("d1", 50.5)
    assert leases.forget("d1") == (7,)
    assert not leases.is_due("d1", 90.0)
    assert len(leases) == 0
