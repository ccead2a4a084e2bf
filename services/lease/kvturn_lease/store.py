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
    draining: bool = False
    """Routers send the engine no new turns."""


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """Who holds, or last held, a conversation's KV."""

    engine_id: str
    end_reason: ReleaseReason
    """NONE while it is held."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An engine registered, or an operator said to drain it or to take it up again."""

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


class Conversations(Protocol):
    """What is recorded of conversations. A dictionary is one."""

    def get(self, key: ConversationKey, /) -> ConversationRecord | None:
        """Returns what is recorded of one, None if nothing is, or it is not known yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a store holds."""

    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    """By engine id; sessions that closed still fence for as long as the store keeps them."""
    conversations: dict[ConversationKey, ConversationRecord] | Conversations = field(
        default_factory=dict
    )
    """Asked whenever a conversation is new to the term."""


class Store(Protocol):
    """The seam behind which records are kept, by one term of leadership at a time."""

    @property
    def waiting(self) -> int:
        """Changes that are not applied yet."""

    async def load(self) -> Snapshot:
        """Returns what earlier terms recorded, before the first `record` of this one."""

    def record(self, changes: Sequence[Change]) -> None:
        """Takes changes to be applied in this order, later; never waits, never raises."""

    async def close(self) -> None:
        """Gives pending changes a last, bounded chance and ends."""


class MemoryStore:
    """Keeps records as long as the process lives; the embedded default."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._conversations: dict[ConversationKey, ConversationRecord] = {}

    @property
    def waiting(self) -> int:
        """None: changes are applied at once."""
        return 0

    async def load(self) -> Snapshot:
        """Returns a copy of what was recorded."""
        return Snapshot(dict(self._sessions), dict(self._conversations))

    def record(self, changes: Sequence[Change]) -> None:
        """Applies the changes at once."""
        for change in changes:
            match change:
                case SessionOpened(record):
                    self._sessions[record.engine_id] = record
                case EngineForgotten(engine_id):
                    self._sessions.pop(engine_id, None)
                case ConversationChanged(key, conversation):
                    self._conversations[key] = conversation
                case ConversationForgotten(key):
                    self._conversations.pop(key, None)
                case SessionKept() | SessionClosed():
                    pass  # records of this store do not age

    async def close(self) -> None:
        """Has nothing pending."""
