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


def test_hold_is_what_the_first_lease_service_says_however_short() -> None:
    """Before that nobody was let read: a session is trusted only when it has echoed something."""
    engine = make()
    engine.open(START_NS)
    assert engine.hold_after_vouch_ns > 3 * NS_PER_S
    Service(engine, 1).registered(START_NS, ttl_ns=NS_PER_S, read_ns=NS_PER_S)
    assert 2 * NS_PER_S < engine.hold_after_vouch_ns < 3 * NS_PER_S


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


# --- sessions: rules 2, 3, 4 ---------------------------------------------------------------------


def test_register_comes_first_and_describes_the_engine() -> None:
    """Sequence 1 of session 1, with nothing held and nobody known."""
    engine = make()
    request = engine.open(START_NS)
    assert (request.session_number, request.sequence) == (1, 1)
    register = request.register
    assert register.engine.engine_id == "decode-0"
    assert len(register.inventory) == 0
    assert not register.HasField("quiet")
    assert register.previous_term == 0


def test_each_register_takes_a_higher_number() -> None:
    """Rule 2, also when the lease service never answers."""
    engine = make()
    numbers = []
    for _ in range(3):
        numbers.append(engine.open(START_NS).session_number)
        engine.close()
    assert numbers == [1, 2, 3]


def test_messages_are_numbered_without_a_gap() -> None:
    """Rule 2: whatever their kind, and from 1 again in the next session."""
    engine = make()
    sent = [engine.open(START_NS)]
    service = Service(engine, 1)
    sent += retain(engine, 1, START_NS)
    sent += service.registered(START_NS)
    sent += engine.tick(START_NS + HEARTBEAT_NS)
    sent += engine.withdraw(1, PRESSURE, START_NS + HEARTBEAT_NS)
    sent += retain(engine, 2, START_NS + HEARTBEAT_NS)
    sent += engine.notice("inc.2.1")
    assert kinds(sent) == [
        "register",
        "grant",
        "heartbeat",
        "heartbeat",
        "heartbeat",
        "grant",
        "freed",
    ]
    assert [request.sequence for request in sent] == list(range(1, 8))
    assert {request.session_number for request in sent} == {1}
    engine.close()
    assert engine.open(START_NS + 2 * HEARTBEAT_NS).sequence == 1


def test_registered_is_answered_by_a_heartbeat_at_once() -> None:
    """Rule 4: Register proves nothing; the echo of its answer does."""
    engine = make()
    engine.open(START_NS)
    assert not engine.registered
    heartbeat = beat(Service(engine, 1, term=9).registered(START_NS + 5))
    assert (heartbeat.echo_term, heartbeat.echo_sequence) == (9, 1)
    assert heartbeat.memory == memory()
    assert engine.registered


def test_no_heartbeat_before_the_answer_to_register() -> None:
    """There is nothing to echo yet, and a withdrawal waits for the first heartbeat."""
    engine = make()
    engine.open(START_NS)
    retain(engine, 1, START_NS)
    assert engine.tick(START_NS + TTL_NS - 1) == []
    assert engine.withdraw(1, PRESSURE, START_NS + 2) == []
    heartbeat = beat(Service(engine, 1).registered(START_NS + 3))
    assert [one.lease_id for one in heartbeat.withdrawn] == ["inc.1.1"]


def test_heartbeat_echoes_the_last_message_heard() -> None:
    """Rule 4, of whatever kind it was."""
    engine = make()
    service = begin(engine, START_NS)
    assert service.ack(START_NS + 1) == []
    assert service.release("inc.99.1", START_NS + 2) == []
    assert beat(engine.tick(START_NS + HEARTBEAT_NS)).echo_sequence == 3


def test_heartbeats_are_due_an_interval_apart() -> None:
    """One per interval; `next_deadline_ns` never lies behind a heartbeat that is due."""
    engine = make()
    service = begin(engine, START_NS)
    assert engine.tick(START_NS + HEARTBEAT_NS - 1) == []
    assert engine.next_deadline_ns() <= START_NS + HEARTBEAT_NS
    beat(engine.tick(START_NS + HEARTBEAT_NS))
    assert engine.tick(START_NS + HEARTBEAT_NS + 1) == []
    service.ack(START_NS + HEARTBEAT_NS + 2)
    beat(engine.tick(START_NS + 2 * HEARTBEAT_NS))


def test_messages_of_another_session_are_dropped() -> None:
    """Rule 2: late ones of the session before, also when they name a lease of this one."""
    engine = make()
    old = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    engine.open(START_NS + 1)
    new = Service(engine, 2)
    assert old.release("inc.1.2", START_NS + 2) == []
    assert old.release("inc.1.1", START_NS + 2) == []
    assert freed(engine) == []
    assert not engine.broken
    assert kinds(new.registered(START_NS + 3)) == ["heartbeat"]


def test_messages_after_close_are_dropped() -> None:
    """The stream ended, but a message was still on its way up."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    service.release("inc.1.1", START_NS + 1)
    assert freed(engine) == []


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_gap_or_repeat_breaks_the_session(sequence: int) -> None:
    """Rule 2: a lost message may have been a Release; nothing after it counts."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    service.sequence = sequence - 1
    assert service.release("inc.1.1", START_NS + 1) == []
    assert engine.broken
    assert freed(engine) == []
    service.sequence = 1
    service.release("inc.1.1", START_NS + 1)
    assert freed(engine) == []


def test_changed_term_breaks_the_session() -> None:
    """Rule 3: another process answers on the same stream; only a Register reaches it."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    service.term = 8
    service.release("inc.1.1", START_NS + 1)
    assert engine.broken
    assert freed(engine) == []


def test_broken_session_sends_nothing() -> None:
    """The stream is about to be closed; what happens meanwhile goes into the next Register."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    retain(engine, 2, START_NS)
    service.sequence += 1
    service.ack(START_NS)
    assert engine.broken
    assert engine.tick(START_NS + HEARTBEAT_NS) == []
    assert engine.withdraw(1, PRESSURE, START_NS + HEARTBEAT_NS) == []
    assert retain(engine, 3, START_NS + HEARTBEAT_NS) == []
    assert engine.notice("inc.2.1") == []
    assert freed(engine) == [2]
    engine.close()
    assert not engine.broken
    register = engine.open(START_NS + HEARTBEAT_NS).register
    assert [one.lease_id for one in register.inventory] == ["inc.3.2"]


def test_silence_for_a_ttl_breaks_the_session() -> None:
    """A frozen lease service; the engine's own heartbeats do not count as being heard."""
    engine = make()
    service = begin(engine, START_NS)
    service.ack(START_NS + 10)
    for now_ns in range(START_NS + HEARTBEAT_NS, START_NS + 10 + TTL_NS, HEARTBEAT_NS):
        beat(engine.tick(now_ns))
    assert not engine.broken
    assert engine.tick(START_NS + 10 + TTL_NS) == []
    assert engine.broken


def test_unanswered_register_breaks_the_session() -> None:
    """A lease service that accepts streams and says nothing."""
    engine = make()
    engine.open(START_NS)
    engine.tick(START_NS + TTL_NS - 1)
    assert not engine.broken
    engine.tick(START_NS + TTL_NS)
    assert engine.broken


def test_ttl_of_the_lease_service_replaces_the_default() -> None:
    """Silence is measured by what the session lives, not by what was assumed before."""
    engine = make()
    engine.open(START_NS)
    Service(engine, 1).registered(START_NS, ttl_ns=2 * TTL_NS)
    engine.tick(START_NS + 2 * TTL_NS - 1)
    assert not engine.broken
    engine.tick(START_NS + 2 * TTL_NS)
    assert engine.broken


# --- Register: inventory, quiet, previous term ---------------------------------------------------


def test_register_lists_all_that_is_vouched_for_under_new_ids() -> None:
    """Rules 5, 6 and 12: neither what was freed nor what was withdrawn."""
    engine = make()
    service = begin(engine, START_NS)
    for number in range(1, 6):
        retain(engine, number, START_NS)
    engine.notice("inc.1.1")
    service.release("inc.2.1", START_NS)
    engine.withdraw(3, PRESSURE, START_NS)
    engine.close()
    register = engine.open(START_NS + 1).register
    assert [one.lease_id for one in register.inventory] == ["inc.4.2", "inc.5.2"]


def test_retention_without_a_session_is_offered_by_the_next_register() -> None:
    """The engine served a turn while the lease service was away."""
    engine = make()
    assert retain(engine, 1, START_NS) == []
    register = engine.open(START_NS + 1).register
    assert [one.lease_id for one in register.inventory] == ["inc.1.1"]


def test_retention_without_a_session_runs_out() -> None:
    """No lease service came: case (c) counts from when the Grant would have vouched."""
    engine = make()
    retain(engine, 1, START_NS)
    engine.tick(START_NS + HOLD_NS - 2)
    assert freed(engine) == []
    engine.tick(START_NS + HOLD_NS)
    assert freed(engine) == [1]
    assert len(engine.open(START_NS + HOLD_NS).register.inventory) == 0


def test_quiet_is_the_time_since_the_last_vouching() -> None:
    """Rule 7 lets the lease service wait that much less."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS + 1)
    engine.tick(START_NS + HEARTBEAT_NS)
    engine.close()
    register = engine.open(START_NS + 3 * HEARTBEAT_NS).register
    assert register.quiet.ToNanoseconds() == 2 * HEARTBEAT_NS
    engine.close()
    register = engine.open(START_NS + 4 * HEARTBEAT_NS).register
    assert register.quiet.ToNanoseconds() == HEARTBEAT_NS


def test_register_tells_the_longest_hold_that_was_ever_told() -> None:
    """A lease service with shorter spans must wait for the readers of one with longer ones."""
    engine = make()
    register = engine.open(START_NS).register
    assert not register.HasField("hold"), "nobody can have been let read"
    engine.close()
    begin(engine, START_NS, number=2)
    engine.close()
    register = engine.open(START_NS + 1).register
    assert register.hold.ToNanoseconds() == engine.hold_after_vouch_ns


def test_withdrawal_does_not_count_as_vouching_in_quiet() -> None:
    """Its heartbeat vouches for the others only."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.withdraw(1, PRESSURE, START_NS + 500)
    engine.close()
    assert engine.open(START_NS + 700).register.quiet.ToNanoseconds() == 700


def test_previous_term_is_that_of_the_last_answer() -> None:
    """A session that nobody answered had no heartbeat either, so it gave nobody any trust."""
    engine = make()
    begin(engine, START_NS, term=7)
    engine.close()
    assert engine.open(START_NS + 1).register.previous_term == 7
    engine.close()
    assert engine.open(START_NS + 2).register.previous_term == 7
    Service(engine, 3, term=8).registered(START_NS + 3)
    engine.close()
    assert engine.open(START_NS + 4).register.previous_term == 8


# --- freeing: rules 10, 11, 12 -------------------------------------------------------------------


def test_notice_under_the_current_id_frees_and_tells() -> None:
    """Rule 10 (a)."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    (request,) = engine.notice("inc.1.1")
    assert request.freed.lease_id == "inc.1.1"
    assert request.freed.reason == common_pb2.RELEASE_REASON_CONSUMED
    assert freed(engine) == [1]
    assert engine.notice("inc.1.1") == []
    assert freed(engine) == []


def test_notice_under_an_old_id_is_ignored() -> None:
    """Rule 10 (a): under the new id the blocks may be being read by somebody else."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    begin(engine, START_NS + 1, number=2)
    assert engine.notice("inc.1.1") == []
    assert freed(engine) == []
    engine.notice("inc.1.2")
    assert freed(engine) == [1]


def test_notice_between_sessions_frees_without_a_message() -> None:
    """The id is still the current one; the next Register does not list the retention."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    assert engine.notice("inc.1.1") == []
    assert freed(engine) == [1]
    assert len(engine.open(START_NS + 1).register.inventory) == 0


def test_release_of_the_current_session_frees() -> None:
    """Rule 10 (b): and only what it names; an unknown id changes nothing."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    retain(engine, 2, START_NS)
    assert service.release("inc.1.1", START_NS + 1) == []
    service.release("inc.1.1", START_NS + 2)
    service.release("nonsense", START_NS + 3)
    assert freed(engine) == [1]
    assert not engine.broken


def test_release_that_names_an_old_id_is_ignored() -> None:
    """Rule 10 (b): it must name the current id as well as come in the current session."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    service = begin(engine, START_NS + 1, number=2)
    service.release("inc.1.1", START_NS + 2)
    assert freed(engine) == []


def test_lost_lease_service_costs_the_hold_and_no_more() -> None:
    """Rule 10 (c): the last heartbeat vouched; nothing was heard after it."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    last_ns = START_NS + 4 * HEARTBEAT_NS
    for now_ns in range(START_NS + HEARTBEAT_NS, last_ns + 1, HEARTBEAT_NS):
        beat(engine.tick(now_ns))
    engine.close()
    engine.tick(last_ns + HOLD_NS - 2)
    assert freed(engine) == []
    engine.tick(last_ns + HOLD_NS)
    assert freed(engine) == [1]


def test_register_vouches() -> None:
    """Rule 10 (c): its inventory makes the lease service believe in the lease again."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    engine.open(START_NS + HOLD_NS - 2)
    engine.close()
    engine.tick(START_NS + 2 * HOLD_NS - 4)
    assert freed(engine) == []
    engine.tick(START_NS + 2 * HOLD_NS)
    assert freed(engine) == [1]


def test_heartbeats_do_not_vouch_for_what_is_withdrawn() -> None:
    """Rule 11: a lease service that never confirms delays the memory by the hold, no longer."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    retain(engine, 2, START_NS)
    assert withdrawn_in(engine.withdraw(1, PRESSURE, START_NS + 1)) == [("inc.1.1", PRESSURE)]
    for beats in range(1, 9):
        now_ns = START_NS + 1 + beats * HEARTBEAT_NS
        service.ack(now_ns)
        assert withdrawn_in(engine.tick(now_ns)) == [("inc.1.1", PRESSURE)]
        assert freed(engine) == []
    now_ns = START_NS + HOLD_NS
    service.ack(now_ns)
    engine.tick(now_ns)
    assert freed(engine) == [1]
    assert withdrawn_in(engine.tick(now_ns + HEARTBEAT_NS)) == []
    assert freed(engine) == []


def test_withdrawal_ends_with_its_release() -> None:
    """Rule 11: no heartbeat after the release names the lease."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.withdraw(1, PRESSURE, START_NS + 1)
    service.release("inc.1.1", START_NS + 2)
    assert freed(engine) == [1]
    assert withdrawn_in(engine.tick(START_NS + 1 + HEARTBEAT_NS)) == []


def test_withdrawal_is_not_taken_into_the_next_session() -> None:
    """Rules 11 and 12: neither in its inventory nor in its heartbeats; case (c) frees it."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.withdraw(1, PRESSURE, START_NS + 1)
    engine.close()
    assert len(engine.open(START_NS + 2).register.inventory) == 0
    assert withdrawn_in(Service(engine, 2).registered(START_NS + 3)) == []
    engine.tick(START_NS + HOLD_NS - 2)
    assert freed(engine) == []
    engine.tick(START_NS + HOLD_NS)
    assert freed(engine) == [1]


def test_withdrawing_twice_says_nothing_new() -> None:
    """Nor does giving up what is gone."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    assert len(engine.withdraw(1, PRESSURE, START_NS + 1)) == 1
    assert engine.withdraw(1, EXPIRED, START_NS + 2) == []
    assert engine.withdraw(99, PRESSURE, START_NS + 2) == []


def test_longest_hold_withdraws_at_once() -> None:
    """Rule 10: the engine asks; it does not free. The heartbeat does not wait for its interval."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS + 1)
    now_ns = START_NS
    while now_ns < START_NS + MAX_HOLD_NS:
        now_ns += HEARTBEAT_NS
        service.ack(now_ns)
        assert withdrawn_in(engine.tick(now_ns)) == []
    assert withdrawn_in(engine.tick(now_ns + 1)) == [("inc.1.1", EXPIRED)]
    assert freed(engine) == []
    service.release("inc.1.1", now_ns + 2, reason=EXPIRED)
    assert freed(engine) == [1]


def test_what_is_too_old_is_not_vouched_for_again() -> None:
    """After a pause, a connection or an answer may come before the tick that gives it up."""
    max_hold_ns = 2 * NS_PER_S
    description = lease_pb2.EngineDescription(engine_id="decode-0", incarnation="inc")
    engine = EngineSession(description, Retentions("inc", 10, max_hold_ns), memory)
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    register = engine.open(START_NS + max_hold_ns - 1).register
    assert len(register.inventory) == 1
    (heartbeat,) = Service(engine, 2).registered(START_NS + max_hold_ns)
    assert [each.lease_id for each in heartbeat.heartbeat.withdrawn] == ["inc.1.2"]
    engine.close()
    assert not engine.open(START_NS + max_hold_ns + 1).register.inventory


def test_longer_times_of_the_lease_service_lengthen_the_hold_at_once() -> None:
    """What was retained under the defaults is held by what the lease service goes by."""
    engine = make()
    retain(engine, 1, START_NS)
    engine.open(START_NS)
    Service(engine, 1).registered(START_NS, ttl_ns=4 * TTL_NS)
    engine.close()
    engine.tick(START_NS + int(DRIFT_MARGIN * (4 * TTL_NS + READ_NS)) - 1)
    assert freed(engine) == []


def test_pause_longer_than_the_hold_frees_and_registers_again() -> None:
    """The process stood still; its timer runs before it looks at the stream."""
    engine = make()
    service = begin(engine, START_NS)
    retain(engine, 1, START_NS)
    now_ns = START_NS + 2 * HOLD_NS
    assert engine.tick(now_ns) == []
    assert engine.broken
    assert freed(engine) == [1]
    service.ack(now_ns)
    engine.close()
    assert len(engine.open(now_ns).register.inventory) == 0


def test_holds_are_checked_while_there_is_no_session() -> None:
    """S5: within a quarter second of the bound, whatever the lease service does."""
    engine = make()
    engine.tick(START_NS)
    assert START_NS < engine.next_deadline_ns() <= START_NS + NS_PER_S // 4
    engine.open(START_NS)
    engine.tick(START_NS + 5)
    assert engine.next_deadline_ns() <= START_NS + 5 + NS_PER_S // 4


def test_retention_beyond_the_limit_is_not_offered() -> None:
    """The engine holds as many as it may; the blocks go back at once."""
    engine = make(retentions_max=1)
    begin(engine, START_NS)
    assert kinds(retain(engine, 1, START_NS)) == ["grant"]
    assert retain(engine, 2, START_NS) == []
    assert freed(engine) == [2]


def test_withdrawal_gives_a_reason_that_the_contract_knows() -> None:
    """A cache reset withdraws all; the lease service would end the session over its reason."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    lost = common_pb2.RELEASE_REASON_ENGINE_LOST
    assert withdrawn_in(engine.withdraw(1, lost, START_NS + 1)) == [("inc.1.1", PRESSURE)]


def test_pressure_while_the_lease_service_is_away_frees_at_once() -> None:
    """S6: what was retained since then was offered to nobody; the rest waits for the hold."""
    engine = make()
    begin(engine, START_NS)
    retain(engine, 1, START_NS)
    engine.close()
    retain(engine, 2, START_NS + 1)
    assert engine.withdraw_all({1: PRESSURE, 2: PRESSURE}, START_NS + 2) == []
    assert freed(engine) == [2]
    assert len(engine.open(START_NS + 3).register.inventory) == 0


def test_acknowledgement_tells_what_is_read_and_what_will_go_on() -> None:
    """By retention number, each change once; lease ids of other sessions mean nothing."""
    engine = make()
    service = begin(engine, START_NS)
    for number in (1, 2):
        retain(engine, number, START_NS)
    engine.withdraw(1, PRESSURE, START_NS)
    ack = lease_pb2.HeartbeatAck(reading=["inc.1.1", "inc.2.9"])
    ack.outlooks.add(lease_id="inc.2.1", outlook=lease_pb2.OUTLOOK_IDLE)
    ack.outlooks.add(lease_id="other.2.1", outlook=lease_pb2.OUTLOOK_IDLE)
    service.send(START_NS, heartbeat_ack=ack)
    assert engine.take_reading() == {1}
    assert engine.take_outlooks() == {2: lease_pb2.OUTLOOK_IDLE}
    assert engine.take_reading() == set()
    assert engine.take_outlooks() == {}


def test_lease_service_is_silent_after_two_heartbeats_and_without_a_session() -> None:
    """Only while it answers do withdrawals free within milliseconds."""
    engine = make()
    assert engine.silent(START_NS)
    service = begin(engine, START_NS)
    assert not engine.silent(START_NS + 2 * HEARTBEAT_NS)
    assert engine.silent(START_NS + 2 * HEARTBEAT_NS + 1)
    service.ack(START_NS + 3 * HEARTBEAT_NS)
    assert not engine.silent(START_NS + 3 * HEARTBEAT_NS)
    engine.close()
    assert engine.silent(START_NS + 3 * HEARTBEAT_NS)
