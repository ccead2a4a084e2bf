"""Why a retention ended, and what a turn that wanted it is told.

The numbers are those of kvturn/v1/common.proto, so that they cross the wire as they are.
"""

from __future__ import annotations

from enum import IntEnum


class ReleaseReason(IntEnum):
    """Says why a retention ended; NONE while it has not."""

    NONE = 0
    CONSUMED = 1
    SUPERSEDED = 2
    ENDED = 3
    IDLE = 4
    PRESSURE = 5
    ENGINE_LOST = 6
    REVOKED = 7
    EXPIRED = 8
    READ_FAILED = 9


class Verdict(IntEnum):
    """The verdicts that the lease service gives; NONE when there is a lease to read."""

    NONE = 0
    FIRST_TURN = 4
    NO_LEASE = 5
    ENDED = 6
    RELEASED = 7
    EXPIRED = 8
    CONSUMED = 9
    READ_IN_PROGRESS = 10
    ENGINE_LOST = 17


class ReadOutcome(IntEnum):
    """How a read ended."""

    COMPLETED = 1
    NOT_READ = 2
    FAILED = 3
    TOO_LONG = 4


# The one right to read a lease is used up by a read that failed as much as by one that
# completed, so both read as CONSUMED to the next turn.
_VERDICTS = {
    ReleaseReason.CONSUMED: Verdict.CONSUMED,
    ReleaseReason.SUPERSEDED: Verdict.RELEASED,
    ReleaseReason.ENDED: Verdict.ENDED,
    ReleaseReason.IDLE: Verdict.RELEASED,
    ReleaseReason.PRESSURE: Verdict.RELEASED,
    ReleaseReason.ENGINE_LOST: Verdict.ENGINE_LOST,
    ReleaseReason.REVOKED: Verdict.RELEASED,
    ReleaseReason.EXPIRED: Verdict.EXPIRED,
    ReleaseReason.READ_FAILED: Verdict.CONSUMED,
}


def verdict_of(reason: ReleaseReason) -> Verdict:
    """Returns what a turn is told whose retention ended for `reason` (not NONE)."""
    return _VERDICTS[reason]
