"""What the lessor wants done: messages to engines, streams to end, records to keep.

Effects are carried out in order, at once, and without the lessor waiting for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvturn_lease.errors import LeaseServiceError
    from kvturn_lease.lease import LeaseId, Outlook, Retention
    from kvturn_lease.session import SessionId
    from kvturn_lease.store import Change
    from kvturn_lease.verdict import ReleaseReason


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers Register."""


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Answers a heartbeat."""

    reading: tuple[LeaseId, ...] = ()
    """Leases it withdrew whose release waits, because they may still be read."""
    outlooks: tuple[tuple[LeaseId, Outlook], ...] = ()
    """Outlooks that changed since the last acknowledgement of the session."""


@dataclass(frozen=True, slots=True)
class Release:
    """Confirms that nobody reads the lease and nobody will."""

    lease_id: LeaseId
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class GrantRefused:
    """Refuses one grant."""

    lease_id: LeaseId
    reason: str


EngineMessage: TypeAlias = Registered | HeartbeatAck | Release | GrantRefused


@dataclass(frozen=True, slots=True)
class SendToEngine:
    """One message on the session's stream."""

    session: SessionId
    sequence: int
    message: EngineMessage


@dataclass(frozen=True, slots=True)
class EndSession:
    """The session is over: end its stream with this error."""

    session: SessionId
    error: LeaseServiceError


@dataclass(frozen=True, slots=True)
class Announced:
    """A retention is the newest of its conversation; whoever waits for it may ask again."""

    retention: Retention
    held: bool
    """False if it ended at once, because the client had ended the conversation."""


@dataclass(frozen=True, slots=True)
class EngineChanged:
    """An engine has a session, or none any more, or what routers know of it has changed."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Record:
    """A change for the store, written behind."""

    change: Change


Effect: TypeAlias = SendToEngine | EndSession | Announced | EngineChanged | Record
