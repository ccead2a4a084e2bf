"""What outlives a lease service: who the engines are, and who holds which conversation.

A store keeps no block ids and no digests: engines bring those whenever they register. It is
written behind: `record` never waits, and no answer to a reader depends on it. What a store
loses costs time (an inherit wait, a verdict that knows less), never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.verdict import ReleaseReason


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """An engine's newest session, which fences all earlier ones."""

    engine_id: str
    incarnation: str
    session_number: int
    fenced: tuple[str, ...]
    """Incarnations that must not come back."""


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """Who holds, or last held, a conversation's KV."""

    engine_id: str
    end_reason: ReleaseReason
    """NONE while it is held."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An engine registered."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class SessionKept:
    """A heartbeat extended the session; what the store attached to it stays alive."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The engine's session is over."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineForgotten:
    """The engine has been away for long and no longer fences anything."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class ConversationChanged:
    """A conversation's retention was granted or ended."""

    key: ConversationKey
    record: ConversationRecord


@dataclass(frozen=True, slots=True)
class ConversationForgotten:
    """The conversation is no longer remembered."""

    key: ConversationKey


Change: TypeAlias = (
    SessionOpened
    | SessionKept
    | SessionClosed
    | EngineForgotten
    | ConversationChanged
    | ConversationForgotten
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a store holds."""

    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    """By engine id; sessions that closed are kept, because they still fence."""
    conversations: dict[ConversationKey, ConversationRecord] = field(default_factory=dict)


class Store(Protocol):
    """The seam behind which records are kept."""

    async def load(self) -> Snapshot:
        """Returns what was recorded, before the first `record` of this process."""

    def record(self, changes: Sequence[Change]) -> None:
        """Takes changes to be applied in this order, later; never waits, never raises."""

    async def close(self) -> None:
        """Gives pending changes a last, bounded chance and ends."""


class MemoryStore:
    """Keeps records as long as the process lives; the embedded default."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()

    async def load(self) -> Snapshot:
        """Returns a copy of what was recorded."""
        return Snapshot(dict(self._snapshot.sessions), dict(self._snapshot.conversations))

    def record(self, changes: Sequence[Change]) -> None:
        """Applies the changes at once."""
        for change in changes:
            match change:
                case SessionOpened(record):
                    self._snapshot.sessions[record.engine_id] = record
                case EngineForgotten(engine_id):
                    self._snapshot.sessions.pop(engine_id, None)
                case ConversationChanged(key, conversation):
                    self._snapshot.conversations[key] = conversation
                case ConversationForgotten(key):
                    self._snapshot.conversations.pop(key, None)
                case SessionKept() | SessionClosed():
                    pass  # records of this store do not age

    async def close(self) -> None:
        """Has nothing pending."""
