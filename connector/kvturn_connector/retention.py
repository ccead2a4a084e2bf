"""What a decode engine holds for later turns, and until when it must hold it. Sans-IO.

A retention is *vouched for* by a Register that lists it, by its Grant, and by every heartbeat that
does not withdraw it. The lease service grants reads only on what is vouched for, so the blocks may
be read until K*(TTL + R) after the engine last vouched: TTL for the lease service's trust, R for
the longest read, K for clock drift. That is why decode frees a retention in three cases only:

(a) a read-completion notice names its current lease id,
(b) the lease service released that id on the current session,
(c) K*(TTL + R) have passed since it was last vouched for.

Reaching its longest hold, or decode needing memory, is no reason to free: it *withdraws* the
retention, which asks for (b) and starts (c). A retention is struck from the inventory the moment
it is freed or withdrawn, before the blocks go back to the pool.

Instants are CLOCK_BOOTTIME nanoseconds of this machine and never leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIFT = 0.01
"""Bound on the drift of one clock against true time."""
DRIFT_MARGIN = (1 + DRIFT) / (1 - DRIFT)
"""K: what one clock may count while another, drifting the other way, counts 1."""


@dataclass(slots=True)
class Retained:
    """One retention on its engine."""

    number: int
    """Counts the retentions of this incarnation, from 1."""
    offer: common_pb2.Retention
    """What a reader is told; its lease id changes with each session."""
    retained_ns: int
    first_session_number: int
    """The session that its Grant belongs to, or the last one before it if there was none open."""
    vouched_ns: int
    """When this engine last vouched for it by itself (Grant); a session's register and heartbeats
    vouch for all that are not withdrawn."""
    offered: bool = False
    """True once a Grant or Register named it; before that nobody can have been let read it."""
    withdrawn_reason: int = common_pb2.RELEASE_REASON_UNSPECIFIED
    """Why it was given up; UNSPECIFIED while it is vouched for."""

    @property
    def withdrawn(self) -> bool:
        return self.withdrawn_reason != common_pb2.RELEASE_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Freed:
    """A retention whose blocks go back to the pool."""

    number: int
    reason: int
    """A ReleaseReason."""


class Retentions:
    """All retentions of one engine incarnation.

    Every method that ends a retention puts it on a list that `take_freed` hands out.
    """

    def __init__(self, incarnation: str, retentions_max: int, max_hold_ns: int) -> None:
        self._incarnation = incarnation
        self._retentions_max = retentions_max
        self._max_hold_ns = max_hold_ns
        self._by_number: dict[int, Retained] = {}
        self._number_by_lease: dict[str, int] = {}
        self._freed: list[Freed] = []
        self._session_number = 0
        self._session_vouched_ns = 0
        self._assumed_hold_ns = 0
        self._told_hold_ns = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Retained]:
        return iter(self._by_number.values())

    @property
    def last_vouched_ns(self) -> int | None:
        """When the engine last vouched for anything; None if it holds nothing."""
        return max((self._vouched_ns(one) for one in self), default=None)

    @property
    def hold_after_vouch_ns(self) -> int:
        """How long after the last vouching blocks may still be read: the longest ever told."""
        return self._told_hold_ns or self._assumed_hold_ns

    @property
    def told_hold_ns(self) -> int:
        """The longest ever told; 0 if none was, and nobody can have been let read."""
        return self._told_hold_ns

    def assume_hold(self, hold_after_vouch_ns: int) -> None:
        """Sets K*(TTL + R) until it is told; nobody is let read before the engine has heard it."""
        self._assumed_hold_ns = hold_after_vouch_ns

    def hold_for(self, hold_after_vouch_ns: int) -> None:
        """Sets K*(TTL + R). Only ever grows: a reader may still go by an earlier, longer one."""
        self._told_hold_ns = max(self._told_hold_ns, hold_after_vouch_ns)

    def begin_session(self, session_number: int, now_ns: int) -> list[common_pb2.Retention]:
        """Renames all that is vouched for to the new session and vouches for it.

        Returns the inventory. Withdrawn retentions are not in it; case (c) frees them.
        """
        self._session_number = session_number
        self._session_vouched_ns = now_ns
        self._number_by_lease.clear()
        for one in self._vouched():
            self._rename(one)
            one.offered = True
        return [one.offer for one in self._vouched()]

    def vouch(self, now_ns: int) -> None:
        """A heartbeat of the current session, stamped before it is sent, vouches for the rest."""
        self._session_vouched_ns = now_ns

    def retain(self, number: int, offer: common_pb2.Retention, now_ns: int) -> Retained | None:
        """Holds the blocks of a finished request; `offer` lacks only its lease id.

        Set `offered` on what is returned if its Grant is sent.
        Returns None, and frees at once, if the engine already holds `retentions_max`.
        """
        assert number not in self._by_number
        if len(self) >= self._retentions_max:
            self._freed.append(Freed(number, common_pb2.RELEASE_REASON_PRESSURE))
            return None
        one = Retained(number, offer, now_ns, self._session_number, vouched_ns=now_ns)
        self._by_number[number] = one
        self._rename(one)
        return one

    def withdraw(self, number: int, reason: int) -> bool:
        """Stops vouching for a retention. False if there is nothing to say about it.

        That is so if it is gone or withdrawn already, or was never offered: then it is freed.
        """
        one = self._by_number.get(number)
        if one is None or one.withdrawn:
            return False
        if not one.offered:
            self._free(one, reason)
            return False
        one.vouched_ns = self._vouched_ns(one)
        one.withdrawn_reason = reason
        return True

    def free(self, lease_id: str, reason: int) -> bool:
        """Cases (a) and (b). False if no retention has that lease id now."""
        number = self._number_by_lease.get(lease_id)
        if number is None:
            return False
        self._free(self._by_number[number], reason)
        return True

    def number_of(self, lease_id: str) -> int | None:
        """The retention that has that lease id now, if any."""
        return self._number_by_lease.get(lease_id)

    def refuse(self, lease_id: str) -> bool:
        """The lease service did not take a retention. True if that withdrew it.

        One that is new in this session was never readable: it is freed. One that an earlier
        session offered may be being read: it is withdrawn.
        """
        number = self._number_by_lease.get(lease_id)
        if number is None:
            return False
        one = self._by_number[number]
        if one.first_session_number != self._session_number:
            return self.withdraw(number, common_pb2.RELEASE_REASON_PRESSURE)
        self._free(one, common_pb2.RELEASE_REASON_PRESSURE)
        return False

    def expire(self, now_ns: int) -> bool:
        """Case (c), and the longest hold. True if anything was withdrawn."""
        withdrawn = False
        for one in list(self):
            if now_ns >= self._vouched_ns(one) + self.hold_after_vouch_ns:
                self._free(one, one.withdrawn_reason or common_pb2.RELEASE_REASON_ENGINE_LOST)
            elif not one.withdrawn and now_ns >= one.retained_ns + self._max_hold_ns:
                withdrawn |= self.withdraw(one.number, common_pb2.RELEASE_REASON_EXPIRED)
        return withdrawn

    def withdrawals(self) -> list[Retained]:
        """Retentions of the current session that are given up but not yet released."""
        return [
            one for one in self if one.withdrawn and one.offer.lease_id in self._number_by_lease
        ]

    def take_freed(self) -> list[Freed]:
        """Hands out, once, the retentions whose blocks can go back to the pool."""
        freed, self._freed = self._freed, []
        return freed

    def _vouched(self) -> Iterator[Retained]:
        return (one for one in self if not one.withdrawn)

    def _vouched_ns(self, one: Retained) -> int:
        if one.withdrawn:
            return one.vouched_ns
        return max(one.vouched_ns, self._session_vouched_ns)

    def _rename(self, one: Retained) -> None:
        one.offer.lease_id = f"{self._incarnation}.{one.number}.{self._session_number}"
        self._number_by_lease[one.offer.lease_id] = one.number

    def _free(self, one: Retained, reason: int) -> None:
        del self._by_number[one.number]
        self._number_by_lease.pop(one.offer.lease_id, None)
        self._freed.append(Freed(one.number, reason))
