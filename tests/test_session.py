"""An engine's sessions with the lease service: scenarios with a hand-made clock."""

from __future__ import annotations

import pytest

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.config import NS_PER_S
from kvturn_connector.retention import DRIFT_MARGIN, Retentions
from kvturn_connector.session import EngineSession

TTL_NS = 5 * NS_PER_S
READ_NS = 3 * NS_PER_S
HEARTBEAT_NS = NS_PER_S
HOLD_NS = int(DRIFT_MARGIN * (TTL_NS + READ_NS)) + 1
MAX_HOLD_NS = 480 * NS_PER_S
START_NS = 1_000 * NS_PER_S

PRESSURE = common_pb2.RELEASE_REASON_PRESSURE
EXPIRED = common_pb2.RELEASE_REASON_EXPIRED

Requests = list[lease_pb2.EngineSessionRequest]


def memory() -> lease_pb2.KvMemory:
    return lease_pb2.KvMemory(total_blocks=100, free_blocks=60, retained_blocks=10)


def make(retentions_max: int = 10) -> EngineSession:
    return EngineSession(
        lease_pb2.EngineDescription(engine_id="decode-0", incarnation="inc"),
        Retentions("inc", retentions_max, MAX_HOLD_NS),
        memory,
    )


def registered(
    ttl_ns: int = TTL_NS, read_ns: int = READ_NS, heartbeat_ns: int = HEARTBEAT_NS
) -> lease_pb2.Registered:
    message = lease_pb2.Registered()
    message.session_ttl.FromNanoseconds(ttl_ns)
    message.longest_read.FromNanoseconds(read_ns)
    message.heartbeat_interval.FromNanoseconds(heartbeat_ns)
    return message


class Service:
    """The lease service's end of one session: numbers its messages."""

    def __init__(self, engine: EngineSession, session_number: int, term: int = 7) -> None:
        self._engine = engine
        self._session_number = session_number
        self.term = term
        self.sequence = 0

    def registered(self, now_ns: int, **durations: int) -> Requests:
        return self.send(now_ns, registered=registered(**durations))

    def ack(self, now_ns: int) -> Requests:
        return self.send(now_ns, heartbeat_ack=lease_pb2.HeartbeatAck())

    def release(self, lease_id: str, now_ns: int, reason: int = PRESSURE) -> Requests:
        return self.send(now_ns, release=lease_pb2.Release(lease_id=lease_id, reason=reason))

    def refuse(self, lease_id: str, now_ns: int) -> Requests:
        return self.send(now_ns, grant_refused=lease_pb2.GrantRefused(lease_id=lease_id))

    def send(self, now_ns: int, **message: object) -> Requests:
        self.sequence += 1
        response = lease_pb2.EngineSessionResponse(
            term=self.term,
            sequence=self.sequence,
            session_number=self._session_number,
            **message,  # type: ignore[arg-type]
        )
        return self._engine.receive(response, now_ns)


def begin(engine: EngineSession, now_ns: int, number: int = 1, term: int = 7) -> Service:
    """Opens a session that the lease service answers at once."""
    engine.open(now_ns)
    service = Service(engine, number, term)
    service.registered(now_ns)
    return service


def retain(engine: EngineSession, number: int, now_ns: int) -> Requests:
    return engine.retain(number, common_pb2.Retention(token_count=1), now_ns)


def freed(engine: EngineSession) -> list[int]:
    return [one.number for one in engine.retentions.take_freed()]


def beat(requests: Requests) -> lease_pb2.Heartbeat:
    (request,) = requests
    assert request.WhichOneof("message") == "heartbeat"
    return request.heartbeat


def kinds(requests: Requests) -> list[str | None]:
    return [request.WhichOneof("message") for request in requests]


def withdrawn_in(requests: Requests) -> list[tuple[str, int]]:
    (request,) = requests
    return [(one.lease_id, one.reason) for one in request.heartbeat.withdrawn]


def test_hold_is_k_times_ttl_and_read_and_never_shrinks() -> None:
    """A second lease service with a short TTL and read does not end the reads of the first."""
    engine = make()
    engine.open(START_NS)
    Service(engine, 1).registered(START_NS, ttl_ns=20 * NS_PER_S, read_ns=10 * NS_PER_S)
    hold_ns = engine.hold_after_vouch_ns
    assert hold_ns >= DRIFT_MARGIN * 30 * NS_PER_S
    engine.close()
    engine.open(START_NS + 1)
    Service(engine, 2, term=8).registered(START_NS + 1, ttl_ns=NS_PER_S, read_ns=NS_PER_S)
    assert engine.hold_after_vouch_ns == hold_ns


def test_refused_grant_is_freed_and_a_refused_inventory_withdrawn() -> None:
    """Only what was never offered before can go at once; the other waits for its readers."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    retain(engine, 2, START_NS)
    assert service.refuse("inc.2.1", START_NS) == []
    assert freed(engine) == [2]
    engine.close()
    service = begin(engine, START_NS + 1, number=2)
    assert withdrawn_in(service.refuse("inc.1.2", START_NS + 2)) == [("inc.1.2", PRESSURE)]
    assert freed(engine) == []
    service.release("inc.1.2", START_NS + 3)
    assert freed(engine) == [1]


def test_many_withdrawals_make_one_heartbeat() -> None:
    """Each heartbeat lists all that is withdrawn: one per retention would be quadratic."""
    engine = make()
    begin(engine, START_NS)
    for number in (1, 2, 3):
        retain(engine, number, START_NS)
    said = withdrawn_in(engine.withdraw_all({1: PRESSURE, 3: EXPIRED, 9: PRESSURE}, START_NS + 1))
    assert said == [("inc.1.1", PRESSURE), ("inc.3.1", EXPIRED)]
    assert engine.withdraw_all({1: PRESSURE, 9: PRESSURE}, START_NS + 2) == []
    assert engine.withdraw_all({}, START_NS + 2) == []


@pytest.mark.parametrize("missing", ["ttl_ns", "read_ns", "heartbeat_ns"])
def test_answer_without_a_duration_breaks_the_session(missing: str) -> None:
    """A heartbeat interval of 0 would be heartbeats without a pause; a TTL of 0, no session."""
    engine = make()
    engine.open(START_NS)
    assert Service(engine, 1).registered(START_NS, **{missing: 0}) == []
    assert engine.broken
    assert not engine.registered
