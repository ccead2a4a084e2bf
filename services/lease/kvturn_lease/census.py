"""What there is at a lease service now, counted without walking over leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvturn_lease.session import KvMemory


@dataclass(frozen=True, slots=True)
class Holding:
    """What one engine with a live session holds."""

    engine_id: str
    draining: bool
    leases: int
    """Those that have not ended."""
    blocks: int
    tokens: int
    """Under leases, those that wait for their release included."""
    memory: KvMemory | None
    """As its latest heartbeat said, None if none came yet."""
    heartbeat_ns: int
    """When that came."""


@dataclass(frozen=True, slots=True)
class Census:
    """All of one term."""

    active: int
    reading: int
    ending: int
    """Leases by state."""
    holdings: list[Holding]
    """Of engines with a live session."""
    away: int
    """Engines without a session whose leases are remembered."""
    conversations: int
    """Conversations that are remembered, with and without a lease."""
