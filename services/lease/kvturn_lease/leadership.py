"""Until when a lease service may speak as the leader, and when to renew; no I/O, no clock.

etcd ends a leader's lease at the earliest its TTL after the last keepalive *reached* it. So trust
counts from when a keepalive that was acknowledged was *sent*, and lasts the granted TTL divided by
K: however the two clocks drift, the old leader is silent before etcd lets there be a new one.
"""

from __future__ import annotations

from kvturn_lease.config import shrunk_ns

_SECOND_NS = 1_000_000_000


class Leadership:
    """One term's trust. All times are CLOCK_BOOTTIME, in nanoseconds."""

    def __init__(self) -> None:
        self._sent_ns = 0
        self._trust_ns = 0

    @property
    def until_ns(self) -> int:
        """When this term ends unless a later keepalive is acknowledged."""
        return self._sent_ns + self._trust_ns

    @property
    def renew_ns(self) -> int:
        """When to send the next keepalive: two more may be lost before the term ends."""
        return self._sent_ns + self._trust_ns // 3

    def acknowledge(self, sent_ns: int, granted_s: int) -> None:
        """Notes that etcd granted so many seconds to a keepalive sent at `sent_ns`."""
        trust_ns = shrunk_ns(granted_s * _SECOND_NS)
        if sent_ns + trust_ns > self.until_ns:
            self._sent_ns, self._trust_ns = sent_ns, trust_ns

    def leads(self, now_ns: int) -> bool:
        """Tells whether this process is sure to lead."""
        return now_ns < self.until_ns
