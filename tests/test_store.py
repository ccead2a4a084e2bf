"""What every store must do, run against the one in memory and the one in etcd."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

import pytest
from etcd_server import EtcdServer, until
from etcd_terms import EtcdTerms

from kvturn_lease.conversation import ConversationKey
from kvturn_lease.store import (
    ConversationChanged,
    ConversationForgotten,
    ConversationRecord,
    EngineForgotten,
    MemoryStore,
    SessionClosed,
    SessionKept,
    SessionOpened,
    SessionRecord,
    Snapshot,
    Store,
)
from kvturn_lease.verdict import ReleaseReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY = ConversationKey("tenant", "model", "conversation")
HELD = ConversationRecord("d1", ReleaseReason.NONE)
CONSUMED = ConversationRecord("d1", ReleaseReason.CONSUMED)
MOVED = ConversationRecord("d2", ReleaseReason.NONE)


class Terms(Protocol):
    """Makes the store of one term after the other, on the same records."""

    async def begin(self) -> tuple[Store, Snapshot]:
        """Ends the term before, if any, and returns the next one's store and what it loaded."""


class MemoryTerms:
    def __init__(self) -> None:
        self._store = MemoryStore()

    async def begin(self) -> tuple[Store, Snapshot]:
        await self._store.close()
        return self._store, await self._store.load()


@pytest.fixture(params=["memory", "etcd"])
async def terms(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Terms]:
    if request.param == "memory":
        yield MemoryTerms()
        return
    async with EtcdServer(tmp_path) as server, EtcdTerms(server.endpoint) as etcd_terms:
        yield etcd_terms


def session(engine_id: str, number: int = 1, *fenced: str) -> SessionOpened:
    return SessionOpened(SessionRecord(engine_id, f"inc-{engine_id}", number, fenced))


async def test_a_new_store_knows_nothing(terms: Terms) -> None:
    """No session, no conversation."""
    _, snapshot = await terms.begin()
    assert snapshot.sessions == {}
    assert snapshot.conversations.get(KEY) is None


async def test_the_next_term_knows_the_newest_session_of_each_engine(terms: Terms) -> None:
    """Also of one that closed: it still fences. Forgotten ones are gone."""
    store, _ = await terms.begin()
    store.record([session("d1"), session("d2"), session("d3")])
    store.record([session("d1", 2, "inc-old"), SessionKept("d1"), SessionClosed("d2")])
    store.record([EngineForgotten("d3")])
    _, snapshot = await terms.begin()
    assert snapshot.sessions == {
        "d1": SessionRecord("d1", "inc-d1", 2, ("inc-old",)),
        "d2": SessionRecord("d2", "inc-d2", 1, ()),
    }


async def test_the_next_term_knows_what_was_last_recorded_of_a_conversation(terms: Terms) -> None:
    """Changes apply in order, within one call and over several terms."""
    store, _ = await terms.begin()
    store.record([session("d1"), session("d2")])
    other = KEY._replace(tenant="other")
    store.record([ConversationChanged(KEY, HELD), ConversationChanged(other, HELD)])
    store.record([ConversationChanged(KEY, CONSUMED), ConversationForgotten(other)])
    store, snapshot = await terms.begin()
    assert await known(snapshot, KEY, CONSUMED)
    assert snapshot.conversations.get(other) is None
    store.record([ConversationForgotten(KEY), ConversationChanged(KEY, MOVED)])
    store, snapshot = await terms.begin()
    assert await known(snapshot, KEY, MOVED)
    store.record([ConversationForgotten(KEY)])
    store, snapshot = await terms.begin()
    store.record([ConversationChanged(other, HELD)])
    _, snapshot = await terms.begin()
    assert await known(snapshot, other, HELD)
    assert snapshot.conversations.get(KEY) is None


async def test_many_changes_at_once_are_kept(terms: Terms) -> None:
    """5,000 conversations recorded in one go; the next term finds each."""
    store, _ = await terms.begin()
    keys = [KEY._replace(conversation_id=secrets.token_hex(8)) for _ in range(5_000)]
    store.record([session("d1")])
    store.record([ConversationChanged(key, HELD) for key in keys])
    store.record([ConversationChanged(key, CONSUMED) for key in keys])
    _, snapshot = await terms.begin()
    for key in keys:
        assert await known(snapshot, key, CONSUMED)


async def known(snapshot: Snapshot, key: ConversationKey, record: ConversationRecord) -> bool:
    """Waits until the snapshot, which may still be filling, knows the conversation."""
    await until(lambda: snapshot.conversations.get(key) is not None)
    return snapshot.conversations.get(key) == record
