"""What has happened at a lease service since its process began, over all its terms: plain numbers.

Cores count here; `metrics.py` writes it down when somebody asks. No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvturn.metrics import Family

if TYPE_CHECKING:
    from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

_STORE_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

STORE_WRITE: Final = Family(
    "kvturn_lease_store_write_seconds",
    "histogram",
    "Time of a transaction that brought records to etcd.",
    (),
    _STORE_S,
)
RENEWAL: Final = Family(
    "kvturn_lease_leadership_renewal_seconds",
    "histogram",
    "Time in which etcd renewed the leadership and showed the leader key.",
    (),
    _STORE_S,
)


class Tally:
    """Counts what happens."""

    def __init__(self) -> None:
        self.registrations = 0
        self.heartbeats = 0
        self.sessions_ended: Counter[str] = Counter()
        """Engines' sessions by how they ended: closed, expired, fenced, deposed."""
        self.grants = 0
        self.inherited = 0
        """Retentions that a Register brought and that this term had not granted."""
        self.grants_refused: Counter[str] = Counter()
        """By reason, as GrantRefused says it."""
        self.ended: Counter[ReleaseReason] = Counter()
        """Leases that are no longer granted, by reason."""
        self.reads_granted = 0
        self.reads_refused: Counter[Verdict] = Counter()
        self.reads_ended: Counter[ReadOutcome] = Counter()
        self.reads_overdue = 0
        """Reads that ended by their bound, without a word."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls that were answered, by method and by "ok" or the error's reason."""
        self.terms = 0
        self.elections: Counter[str] = Counter()
        """Attempts to be elected: won, lost (another was faster), failed (etcd gave no answer)."""
        self.store_failures: Counter[str] = Counter()
        """What etcd did not do, by operation: elect, renew, write."""
        self.records_dropped = 0
        """Records that etcd was too slow for, or refused."""
        self.store_write = STORE_WRITE.histogram()
        self.renewal = RENEWAL.histogram()
