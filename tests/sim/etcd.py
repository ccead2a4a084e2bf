"""etcd as far as lease services depend on it: who leads, and records that outlive a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvturn_lease.store import (
    Change,
    ConversationChanged,
    ConversationForgotten,
    EngineForgotten,
    SessionOpened,
    Snapshot,
)
from sim.world import Node

if TYPE_CHECKING:
    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.store import ConversationRecord, SessionRecord
    from sim.weather import Weather
    from sim.world import World


class Records:
    """What lease services wrote behind."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._conversations: dict[ConversationKey, ConversationRecord] = {}

    def apply(self, change: Change) -> None:
        """Applies one change."""
        match change:
            case SessionOpened(record):
                self._sessions[record.engine_id] = record
            case EngineForgotten(engine_id):
                self._sessions.pop(engine_id, None)
            case ConversationChanged(key, conversation):
                self._conversations[key] = conversation
            case ConversationForgotten(key):
                self._conversations.pop(key, None)

    def load(self) -> Snapshot:
        """Returns a copy."""
        return Snapshot(dict(self._sessions), dict(self._conversations))


class Etcd(Node):
    """The store of all lease services, and the judge of who leads."""

    def __init__(self, world: World, weather: Weather, drift_ppm: int) -> None:
        super().__init__(world, "etcd", drift_ppm)
        self._ttl_ns = weather.leader_ttl_ns
        self.leader = ""
        self._attempt = 0
        self._expires_ns = 0
        self.records = Records()

    def campaign(self, candidate: str, attempt: int) -> tuple[bool, str, Snapshot | None]:
        """Makes the candidate the leader, or keeps it that, if nobody else is.

        `attempt` counts its terms and tries: an older one's message, late or doubled, changes
        nothing. Returns whether it leads, who leads, and what a new leader starts from.
        """
        now_ns = self.clock_ns()
        if now_ns >= self._expires_ns:
            self.leader = ""
        ours = self.leader == candidate
        if self.leader and (not ours or attempt < self._attempt):
            return False, self.leader, None
        renewed = ours and attempt == self._attempt
        self.leader, self._attempt = candidate, attempt
        self._expires_ns = now_ns + self._ttl_ns
        return True, candidate, None if renewed else self.records.load()

    def resign(self, candidate: str, attempt: int) -> None:
        """Ends that leadership at once."""
        if (self.leader, self._attempt) == (candidate, attempt):
            self.leader = ""

    def restarted(self) -> None:
        """It was restarted: every lease lives for its whole TTL again."""
        self._expires_ns = self.clock_ns() + self._ttl_ns

    def write(self, changes: list[Change]) -> None:
        """Takes what a lease service wrote behind."""
        for change in changes:
            self.records.apply(change)

    def wipe(self) -> None:
        """Loses everything."""
        self.leader = ""
        self.records = Records()
