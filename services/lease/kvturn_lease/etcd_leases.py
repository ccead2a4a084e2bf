"""Which etcd leases an engine's records hang on, and when to renew them; no I/O.

An engine has one lease, and one more for each 20,000 records. They live as long as the engine's
heartbeats come, so that nothing of an engine that is gone stays in etcd; one renewal in a third of
their TTL is enough, whatever the heartbeat interval.
"""

from __future__ import annotations

from collections import Counter

RECORDS_PER_LEASE_MAX = 20_000
"""A lease of many keys takes etcd long to end: 0.1 s for 20,000."""
_RETRY_S = 0.5


class EtcdLeases:
    """The leases of all engines."""

    def __init__(self, ttl_s: int, records_per_lease_max: int = RECORDS_PER_LEASE_MAX) -> None:
        """`ttl_s` is the TTL of every lease."""
        self.ttl_s = ttl_s
        self._records_max = records_per_lease_max
        self._of_engine: dict[str, list[int]] = {}
        self._engine_of: dict[int, str] = {}
        self._records: Counter[int] = Counter()
        self._due_s: dict[str, float] = {}
        """By engine: when its leases may be renewed next."""

    def __len__(self) -> int:
        return len(self._engine_of)

    def room(self, engine_id: str) -> int | None:
        """Returns a lease of the engine that takes one more record, None if there is none."""
        for lease_id in self._of_engine.get(engine_id, ()):
            if self._records[lease_id] < self._records_max:
                return lease_id
        return None

    def of_engine(self, engine_id: str) -> tuple[int, ...]:
        """Returns the engine's leases."""
        return tuple(self._of_engine.get(engine_id, ()))

    def add(self, engine_id: str, lease_id: int) -> None:
        """Takes a lease for the engine's records; nothing if it is known."""
        if lease_id not in self._engine_of:
            self._engine_of[lease_id] = engine_id
            self._of_engine.setdefault(engine_id, []).append(lease_id)

    def attach(self, lease_id: int, records: int = 1) -> None:
        """Notes that a record hangs on the lease now."""
        if lease_id in self._engine_of:
            self._records[lease_id] += records

    def detach(self, lease_id: int) -> None:
        """Notes that a record no longer hangs on the lease."""
        if lease_id in self._engine_of:
            self._records[lease_id] -= 1

    def drop(self, lease_id: int) -> str | None:
        """Forgets a lease that is gone, its records with it; returns whose it was."""
        engine_id = self._engine_of.pop(lease_id, None)
        if engine_id is None:
            return None
        del self._records[lease_id]
        leases = self._of_engine[engine_id]
        leases.remove(lease_id)
        if not leases:
            del self._of_engine[engine_id]
        return engine_id

    def forget(self, engine_id: str) -> tuple[int, ...]:
        """Forgets the engine; returns its leases, which are to be revoked."""
        leases = self.of_engine(engine_id)
        for lease_id in leases:
            self.drop(lease_id)
        self._due_s.pop(engine_id, None)
        return leases

    def is_due(self, engine_id: str, now_s: float) -> bool:
        """Tells, after a heartbeat, whether its leases are to be renewed; if so, once."""
        if now_s < self._due_s.get(engine_id, 0.0) or engine_id not in self._of_engine:
            return False
        self._due_s[engine_id] = now_s + self.ttl_s / 3
        return True

    def retry(self, engine_id: str, now_s: float) -> None:
        """Lets a renewal that failed be tried again soon, at a heartbeat."""
        if engine_id in self._of_engine:
            self._due_s[engine_id] = now_s + _RETRY_S
