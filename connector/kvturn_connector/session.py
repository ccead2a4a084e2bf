"""An engine's session with the lease service, from the engine's side. Sans-IO.

The shell opens a stream, sends what `open` then returns, feeds every message to `receive`, calls
`tick` at `next_deadline_ns`, and sends whatever these return, in order. When `broken` turns true,
or the stream ends, it calls `close` and opens the next one.

A session is (engine_id, incarnation, number). Each Register takes a higher number, so that nothing
said in an earlier session can be mistaken for this one. Register proves nothing: the engine
heartbeats at once when it is answered, and each heartbeat echoes the last message received, from
whose *sending* the lease service counts its trust.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import NS_PER_S
from kvturn_connector.retention import DRIFT_MARGIN, Retentions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_SESSION_TTL_NS = 5 * NS_PER_S
DEFAULT_LONGEST_READ_NS = 3 * NS_PER_S
DEFAULT_HEARTBEAT_INTERVAL_NS = NS_PER_S
WITHDRAW_REASONS = (
    common_pb2.RELEASE_REASON_PRESSURE,
    common_pb2.RELEASE_REASON_EXPIRED,
    common_pb2.RELEASE_REASON_SUPERSEDED,
)
"""Reasons that a heartbeat may give; any other ends the session, and with it the withdrawal."""
EXPIRE_INTERVAL_NS = NS_PER_S // 4
"""How often holds are checked while there is no session to heartbeat."""


class EngineSession:
    """One engine's sessions, one after the other, and its retentions."""

    def __init__(
        self,
        engine: lease_pb2.EngineDescription,
        retentions: Retentions,
        memory: Callable[[], lease_pb2.KvMemory],
    ) -> None:
        """
        Args:
            engine: what the engine says about itself.
            retentions: what it holds; owned by this session from now on.
            memory: reads the engine's KV memory now.
        """
        self.retentions = retentions
        self.broken = False
        """True when the stream must be closed: a gap, a foreign term, an answer that makes no
        sense, or silence for a TTL."""
        self._engine = engine
        self._memory = memory
        self._number = 0
        self._sequence = 0
        self._open = False
        self._registered = False
        self._term = 0
        self._heard_sequence = 0
        self._heard_ns = 0
        self._heartbeat_ns = 0
        self._heartbeat_interval_ns = DEFAULT_HEARTBEAT_INTERVAL_NS
        self._session_ttl_ns = DEFAULT_SESSION_TTL_NS
        self._longest_read_ns = DEFAULT_LONGEST_READ_NS
        self._expire_ns = 0
        self._reading: set[int] = set()
        self._outlooks: dict[int, int] = {}
        retentions.assume_hold(self._hold_ns())

    @property
    def registered(self) -> bool:
        """True while the lease service has answered this session's Register."""
        return self._registered

    @property
    def hold_after_vouch_ns(self) -> int:
        """K*(TTL + R): how long blocks may be read after they were last vouched for.

        Never shrinks: a reader may still go by what an earlier lease service allowed.
        """
        return self.retentions.hold_after_vouch_ns

    def open(self, now_ns: int) -> lease_pb2.EngineSessionRequest:
        """Begins the next session. Returns its Register, to be sent first on a new stream.

        Call it once the stream stands: from now on what the Register lists counts as vouched for.
        """
        assert not self._open
        self.retentions.expire(now_ns)
        quiet_since_ns = self.retentions.last_vouched_ns
        self._number += 1
        self._sequence = 0
        self._heard_sequence = 0
        self._heard_ns = now_ns
        self._open = True
        self.broken = False
        register = lease_pb2.RegisterEngine(
            engine=self._engine,
            inventory=self.retentions.begin_session(self._number, now_ns),
            previous_term=self._term,
        )
        if quiet_since_ns is not None:
            register.quiet.FromNanoseconds(max(0, now_ns - quiet_since_ns))
        if self.retentions.told_hold_ns:
            register.hold.FromNanoseconds(self.retentions.told_hold_ns)
        return self._request(register=register)

    def close(self) -> None:
        """The stream ended. What is held stays held until it is vouched for again or runs out."""
        self._open = False
        self._registered = False
        self.broken = False

    def receive(
        self, response: lease_pb2.EngineSessionResponse, now_ns: int
    ) -> list[lease_pb2.EngineSessionRequest]:
        """Takes one message of the lease service."""
        if not self._open or self.broken or response.session_number != self._number:
            return []
        if response.sequence != self._heard_sequence + 1 or (
            self._heard_sequence and response.term != self._term
        ):
            self.broken = True
            return []
        self._term = response.term
        self._heard_sequence = response.sequence
        self._heard_ns = now_ns
        kind = response.WhichOneof("message")
        if kind == "registered":
            return self._on_registered(response.registered, now_ns)
        if kind == "release":
            self.retentions.free(response.release.lease_id, response.release.reason)
        elif kind == "heartbeat_ack":
            self._on_heartbeat_ack(response.heartbeat_ack)
        elif kind == "grant_refused":
            withdrawn = self.retentions.refuse(response.grant_refused.lease_id)
            return [self._heartbeat(now_ns)] if withdrawn and self._registered else []
        return []

    def take_reading(self) -> set[int]:
        """Withdrawn retentions that may still be read, by number: do not wait for those."""
        reading, self._reading = self._reading, set()
        return reading

    def take_outlooks(self) -> dict[int, int]:
        """Outlooks that changed since the last call, by number of the retention."""
        outlooks, self._outlooks = self._outlooks, {}
        return outlooks

    def silent(self, now_ns: int) -> bool:
        """True if the lease service has missed two heartbeats, or there is no session."""
        return not self._registered or now_ns > self._heard_ns + 2 * self._heartbeat_interval_ns

    def tick(self, now_ns: int) -> list[lease_pb2.EngineSessionRequest]:
        """Heartbeats when due, ends holds, notices a lease service that went silent."""
        self._expire_ns = now_ns + EXPIRE_INTERVAL_NS
        withdrawn = self.retentions.expire(now_ns)
        if not self._open or self.broken:
            return []
        if now_ns >= self._heard_ns + self._session_ttl_ns:
            self.broken = True
            return []
        if self._registered and (withdrawn or now_ns >= self._heartbeat_ns):
            return [self._heartbeat(now_ns)]
        return []

    def next_deadline_ns(self) -> int:
        """When `tick` wants to be called next, at the latest."""
        if self._registered and not self.broken:
            return min(self._expire_ns, self._heartbeat_ns)
        return self._expire_ns

    def retain(
        self, number: int, offer: common_pb2.Retention, now_ns: int, traceparent: str = ""
    ) -> list[lease_pb2.EngineSessionRequest]:
        """Holds a finished request's blocks and grants a lease on them.

        `traceparent` is the turn's trace context, for the lease service's span. Without an open
        session the next Register offers them, if it comes in time.
        """
        one = self.retentions.retain(number, offer, now_ns)
        if one is None or not self._open or self.broken:
            return []
        one.offered = True
        return [self._request(grant=lease_pb2.Grant(retention=one.offer, traceparent=traceparent))]

    def withdraw(
        self, number: int, reason: int, now_ns: int
    ) -> list[lease_pb2.EngineSessionRequest]:
        """Gives a retention up; says so at once, since somebody waits for the memory."""
        return self.withdraw_all({number: reason}, now_ns)

    def withdraw_all(
        self, reasons: Mapping[int, int], now_ns: int
    ) -> list[lease_pb2.EngineSessionRequest]:
        """Gives retentions up, by number with reason, and says so in one heartbeat."""
        withdrawn = [
            number for number, reason in reasons.items() if self.retentions.withdraw(number, reason)
        ]
        if not withdrawn or not self._registered or self.broken:
            return []
        return [self._heartbeat(now_ns)]

    def notice(self, lease_id: str) -> list[lease_pb2.EngineSessionRequest]:
        """All ranks have read the retention that has this lease id now."""
        reason = common_pb2.RELEASE_REASON_CONSUMED
        if not self.retentions.free(lease_id, reason) or not self._open or self.broken:
            return []
        return [self._request(freed=lease_pb2.RetentionFreed(lease_id=lease_id, reason=reason))]

    def _on_registered(
        self, registered: lease_pb2.Registered, now_ns: int
    ) -> list[lease_pb2.EngineSessionRequest]:
        session_ttl_ns = registered.session_ttl.ToNanoseconds()
        longest_read_ns = registered.longest_read.ToNanoseconds()
        heartbeat_interval_ns = registered.heartbeat_interval.ToNanoseconds()
        if min(session_ttl_ns, longest_read_ns, heartbeat_interval_ns) <= 0:
            # Durations that are missing would mean heartbeats without a pause.
            self.broken = True
            return []
        self._registered = True
        self._session_ttl_ns = session_ttl_ns
        self._longest_read_ns = longest_read_ns
        self._heartbeat_interval_ns = heartbeat_interval_ns
        self.retentions.hold_for(self._hold_ns())
        return [self._heartbeat(now_ns)]

    def _on_heartbeat_ack(self, ack: lease_pb2.HeartbeatAck) -> None:
        for lease_id in ack.reading:
            number = self.retentions.number_of(lease_id)
            if number is not None:
                self._reading.add(number)
        for one in ack.outlooks:
            number = self.retentions.number_of(one.lease_id)
            if number is not None:
                self._outlooks[number] = one.outlook

    def _heartbeat(self, now_ns: int) -> lease_pb2.EngineSessionRequest:
        # After a pause this may come before the tick that gives up what is too old.
        self.retentions.expire(now_ns)
        self.retentions.vouch(now_ns)
        self._heartbeat_ns = now_ns + self._heartbeat_interval_ns
        heartbeat = lease_pb2.Heartbeat(
            echo_term=self._term, echo_sequence=self._heard_sequence, memory=self._memory()
        )
        for one in self.retentions.withdrawals():
            reason = one.withdrawn_reason
            if reason not in WITHDRAW_REASONS:
                reason = common_pb2.RELEASE_REASON_PRESSURE
            heartbeat.withdrawn.add(lease_id=one.offer.lease_id, reason=reason)
        return self._request(heartbeat=heartbeat)

    def _hold_ns(self) -> int:
        return math.ceil(DRIFT_MARGIN * (self._session_ttl_ns + self._longest_read_ns))

    def _request(
        self,
        *,
        register: lease_pb2.RegisterEngine | None = None,
        heartbeat: lease_pb2.Heartbeat | None = None,
        grant: lease_pb2.Grant | None = None,
        freed: lease_pb2.RetentionFreed | None = None,
    ) -> lease_pb2.EngineSessionRequest:
        self._sequence += 1
        return lease_pb2.EngineSessionRequest(
            session_number=self._number,
            sequence=self._sequence,
            register=register,
            heartbeat=heartbeat,
            grant=grant,
            freed=freed,
        )
