"""An engine and its session: who sends, in which order, and until when it is trusted."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvturn_lease.deadline_queue import NEVER_NS
from kvturn_lease.errors import InvalidArgument, SequenceGap
from kvturn_lease.usage import Usage

if TYPE_CHECKING:
    from kvturn_lease.lease import Lease
    from kvturn_lease.verdict import ReleaseReason

_STAMPS_MAX = 256
FENCED_INCARNATIONS_MAX = 16


class SessionId(NamedTuple):
    """Names a session; messages of any other session are dropped."""

    engine_id: str
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says about itself; the core passes the two payloads through."""

    http_address: str
    retains: bool
    """False for an engine that only prefills."""
    description: bytes
    nixl: bytes


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV memory of an engine, in blocks."""

    total_blocks: int
    free_blocks: int
    retained_blocks: int


class Session:
    """One session, from its Register on.

    Trust counts from when a message was *sent* that the engine echoes: what the engine says on
    its own proves that it lived once, not when. `stamps` therefore keeps, for messages not yet
    echoed, when each was sent. It is bounded by leaving out later ones, which only shortens
    trust: an echo counts from the latest message at or before it whose time is known.
    """

    __slots__ = (
        "deadline_ns",
        "heartbeat_ns",
        "memory",
        "number",
        "proven",
        "received_sequence",
        "sent_sequence",
        "stamps",
    )

    def __init__(self, number: int, now_ns: int, ttl_ns: int) -> None:
        self.number = number
        self.received_sequence = 1  # Register
        self.sent_sequence = 0
        self.stamps: deque[tuple[int, int]] = deque()
        self.proven = False
        """The engine has echoed a message of this session; until then it grants nothing."""
        self.deadline_ns = now_ns + ttl_ns
        self.heartbeat_ns = now_ns
        self.memory: KvMemory | None = None

    def receive(self, sequence: int) -> None:
        """Accepts the next message. Raises SequenceGap if one is missing or repeated."""
        if sequence != self.received_sequence + 1:
            raise SequenceGap(self.received_sequence + 1, sequence)
        self.received_sequence = sequence

    def stamp(self, now_ns: int) -> int:
        """Returns the sequence of a message that is about to be sent, and notes the time."""
        self.sent_sequence += 1
        known = self.stamps
        if not known or (known[-1][1] != now_ns and len(known) < _STAMPS_MAX):
            known.append((self.sent_sequence, now_ns))
        return self.sent_sequence

    def check_echo(self, sequence: int) -> None:
        """Raises InvalidArgument for the echo of a message that was never sent."""
        if sequence > self.sent_sequence:
            raise InvalidArgument("heartbeat.echo_sequence", "names a message that was not sent")

    def echo(self, sequence: int, ttl_ns: int) -> None:
        """Extends trust to `ttl_ns` after the echoed message was sent."""
        if sequence == 0:
            return
        self.proven = True
        while self.stamps and self.stamps[0][0] <= sequence:
            sent_ns = self.stamps.popleft()[1]
            self.deadline_ns = max(self.deadline_ns, sent_ns + ttl_ns)


class Engine:
    """An engine that registered, with or without a live session.

    Without one its leases are kept for a while: the engine may come back, and a read that was
    granted stays granted.
    """

    __slots__ = (
        "active_count",
        "displaced",
        "draining",
        "engine_id",
        "expired_count",
        "expired_ns",
        "fenced",
        "forget_ns",
        "incarnation",
        "info",
        "leases",
        "number",
        "outlooks",
        "releasing",
        "remembered",
        "session",
        "timer_ns",
        "usage",
    )

    def __init__(self, engine_id: str, incarnation: str) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.number = 0
        """Highest session number of this incarnation."""
        self.fenced: deque[str] = deque(maxlen=FENCED_INCARNATIONS_MAX)
        """Incarnations that this one replaced; they never come back."""
        self.displaced: deque[str] = deque(maxlen=FENCED_INCARNATIONS_MAX)
        """Incarnations in whose place this one registered and has not yet shown that it lives."""
        self.info = EngineInfo("", False, b"", b"")
        self.draining = False
        """Routers send it no new turns."""
        self.session: Session | None = None
        self.expired_count = 0
        """Sessions that ended for silence, in this term."""
        self.expired_ns: int | None = None
        """When the last of them did."""
        self.leases: dict[int, Lease] = {}
        """By retention number; ended leases included until they are released."""
        self.active_count = 0
        """Leases that have not ended."""
        self.releasing: OrderedDict[int, tuple[int, ReleaseReason]] = OrderedDict()
        """By retention number: releases that the engine may not have received, because it has
        not echoed that sequence; should it list such a retention again, it stays ended."""
        self.outlooks: dict[int, Lease] = {}
        """By retention number: leases whose outlook the engine has not been told yet."""
        self.usage = Usage()
        """Of all in `leases`."""
        self.remembered = False
        """All that this term granted on the incarnation's leases is still in `leases`."""
        self.forget_ns = NEVER_NS
        """While away: when its leases are given up."""
        self.timer_ns = NEVER_NS


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine with a live session as shown to an operator."""

    engine_id: str
    session_number: int
    description: bytes
    lease_count: int
    memory: KvMemory | None
    heartbeat_age_ns: int
    draining: bool
    expired_count: int
    """Sessions that ended for silence, in this term."""
    expiry_age_ns: int | None
    """Time since the last of them did."""
