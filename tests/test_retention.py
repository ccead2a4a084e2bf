"""What a decode engine holds, under which lease ids, and when it may let go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.retention import DRIFT, DRIFT_MARGIN, Freed, Retentions
from kvturn_connector.session import EngineSession

PRESSURE = common_pb2.RELEASE_REASON_PRESSURE
CONSUMED = common_pb2.RELEASE_REASON_CONSUMED
EXPIRED = common_pb2.RELEASE_REASON_EXPIRED
ENGINE_LOST = common_pb2.RELEASE_REASON_ENGINE_LOST

HOLD_NS = 100
MAX_HOLD_NS = 10_000


def make(retentions_max: int = 10) -> Retentions:
    retentions = Retentions("inc", retentions_max, MAX_HOLD_NS)
    retentions.hold_for(HOLD_NS)
    return retentions


def offer() -> common_pb2.Retention:
    return common_pb2.Retention(token_count=1)


def grant(retentions: Retentions, number: int, now_ns: int) -> None:
    one = retentions.retain(number, offer(), now_ns)
    assert one is not None
    one.offered = True


def lease_ids(inventory: list[common_pb2.Retention]) -> list[str]:
    return [retention.lease_id for retention in inventory]


def test_drift_margin_is_k() -> None:
    """K of the lease rules: one clock slow, the other fast."""
    assert pytest.approx(1.0202, abs=1e-4) == DRIFT_MARGIN
    assert (1 + DRIFT) / (1 - DRIFT) == DRIFT_MARGIN


def test_lease_id_names_incarnation_number_and_session() -> None:
    """Rule 6: never the request id; unique for ever."""
    retentions = make()
    retentions.begin_session(3, now_ns=0)
    one = retentions.retain(7, offer(), now_ns=1)
    assert one is not None
    assert one.offer.lease_id == "inc.7.3"


def test_each_session_renames_what_is_vouched_for() -> None:
    """Rule 6: an id of an earlier session names nothing any more."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=1)
    assert lease_ids(retentions.begin_session(2, now_ns=2)) == ["inc.1.2"]
    assert not retentions.free("inc.1.1", CONSUMED)
    assert retentions.take_freed() == []
    assert retentions.free("inc.1.2", CONSUMED)
    assert retentions.take_freed() == [Freed(1, CONSUMED)]


def test_freed_retention_is_struck_at_once() -> None:
    """Rule 12: it is in no later inventory, and is handed out for freeing once."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=1)
    grant(retentions, 2, now_ns=1)
    retentions.free("inc.1.1", CONSUMED)
    assert not retentions.free("inc.1.1", CONSUMED)
    assert lease_ids(retentions.begin_session(2, now_ns=2)) == ["inc.2.2"]
    assert retentions.take_freed() == [Freed(1, CONSUMED)]
    assert retentions.take_freed() == []
    assert len(retentions) == 1


def test_withdrawn_retention_is_held_but_in_no_inventory() -> None:
    """Rules 10 and 12: giving up is not freeing; the next Register does not list it."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=1)
    assert retentions.withdraw(1, PRESSURE)
    assert retentions.take_freed() == []
    assert len(retentions) == 1
    assert retentions.begin_session(2, now_ns=2) == []
    assert retentions.take_freed() == []


def test_withdrawal_is_said_until_its_session_ends() -> None:
    """Rule 11: the ids of another session mean nothing to the lease service."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=1)
    grant(retentions, 2, now_ns=1)
    retentions.withdraw(1, PRESSURE)
    for _ in range(3):
        said = [(one.number, one.withdrawn_reason) for one in retentions.withdrawals()]
        assert said == [(1, PRESSURE)]
    retentions.begin_session(2, now_ns=2)
    assert retentions.withdrawals() == []


def test_withdrawal_is_said_until_released() -> None:
    """Rule 11, the other end: case (b)."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=1)
    retentions.withdraw(1, PRESSURE)
    assert retentions.free("inc.1.1", PRESSURE)
    assert retentions.withdrawals() == []
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_withdrawing_again_keeps_the_first_reason() -> None:
    """The clock of case (c) is not started again either."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=0)
    assert retentions.withdraw(1, PRESSURE)
    assert not retentions.withdraw(1, EXPIRED)
    assert not retentions.withdraw(2, EXPIRED)
    retentions.vouch(now_ns=90)
    retentions.expire(now_ns=100)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_grant_vouches() -> None:
    """Rule 10 (c): the hold counts from the Grant if nothing vouched later."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=50)
    retentions.expire(now_ns=149)
    assert len(retentions) == 1
    retentions.expire(now_ns=150)
    assert retentions.take_freed() == [Freed(1, ENGINE_LOST)]


def test_heartbeat_vouches_for_all_that_is_not_withdrawn() -> None:
    """Rule 10 (c), with the clock of the withdrawn one running from before its withdrawal."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=0)
    grant(retentions, 2, now_ns=0)
    retentions.vouch(now_ns=40)
    retentions.withdraw(1, PRESSURE)
    retentions.vouch(now_ns=80)
    retentions.expire(now_ns=139)
    assert retentions.take_freed() == []
    retentions.expire(now_ns=140)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]
    retentions.expire(now_ns=179)
    assert retentions.take_freed() == []
    retentions.expire(now_ns=180)
    assert retentions.take_freed() == [Freed(2, ENGINE_LOST)]


def test_register_vouches_for_what_it_lists_only() -> None:
    """Rule 10 (c): a withdrawn retention keeps the vouching of the session it was withdrawn in."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=0)
    grant(retentions, 2, now_ns=0)
    retentions.vouch(now_ns=40)
    retentions.withdraw(1, PRESSURE)
    retentions.begin_session(2, now_ns=60)
    retentions.vouch(now_ns=70)
    retentions.expire(now_ns=139)
    assert retentions.take_freed() == []
    retentions.expire(now_ns=140)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]
    retentions.expire(now_ns=169)
    assert retentions.take_freed() == []
    retentions.expire(now_ns=170)
    assert retentions.take_freed() == [Freed(2, ENGINE_LOST)]


def test_longest_hold_withdraws_and_does_not_free() -> None:
    """Rule 10: the engine's own deadline is no reason to free."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=5)
    retentions.vouch(now_ns=MAX_HOLD_NS)
    assert not retentions.expire(now_ns=MAX_HOLD_NS + 4)
    assert retentions.expire(now_ns=MAX_HOLD_NS + 5)
    assert [one.withdrawn_reason for one in retentions.withdrawals()] == [EXPIRED]
    assert not retentions.expire(now_ns=MAX_HOLD_NS + 6)
    assert retentions.take_freed() == []
    retentions.vouch(now_ns=MAX_HOLD_NS + 50)
    retentions.expire(now_ns=MAX_HOLD_NS + HOLD_NS)
    assert retentions.take_freed() == [Freed(1, EXPIRED)]


def test_hold_never_shrinks() -> None:
    """A reader may still go by an earlier, longer one."""
    retentions = make()
    retentions.hold_for(HOLD_NS // 2)
    assert retentions.hold_after_vouch_ns == HOLD_NS
    grant(retentions, 1, now_ns=0)
    retentions.expire(now_ns=HOLD_NS - 1)
    assert len(retentions) == 1


def test_hold_grows_for_what_is_held_already() -> None:
    """The lease service that is about to trust the engine trusts it for longer."""
    retentions = make()
    grant(retentions, 1, now_ns=0)
    retentions.hold_for(3 * HOLD_NS)
    retentions.expire(now_ns=3 * HOLD_NS - 1)
    assert len(retentions) == 1
    retentions.expire(now_ns=3 * HOLD_NS)
    assert len(retentions) == 0


def test_retention_beyond_the_limit_is_freed_at_once() -> None:
    """It was offered to nobody; what is held stays held."""
    retentions = make(retentions_max=2)
    retentions.begin_session(1, now_ns=0)
    assert retentions.retain(1, offer(), now_ns=0) is not None
    assert retentions.retain(2, offer(), now_ns=0) is not None
    assert retentions.retain(3, offer(), now_ns=0) is None
    assert retentions.take_freed() == [Freed(3, PRESSURE)]
    assert len(retentions) == 2
    retentions.free("inc.1.1", CONSUMED)
    assert retentions.retain(4, offer(), now_ns=0) is not None


def test_last_vouched_is_that_of_the_freshest() -> None:
    """What Register's quiet counts from: it must never be longer ago than any one's vouching."""
    retentions = make()
    assert retentions.last_vouched_ns is None
    retentions.begin_session(1, now_ns=0)
    assert retentions.last_vouched_ns is None
    grant(retentions, 1, now_ns=10)
    assert retentions.last_vouched_ns == 10
    retentions.vouch(now_ns=20)
    assert retentions.last_vouched_ns == 20
    retentions.withdraw(1, PRESSURE)
    retentions.vouch(now_ns=30)
    assert retentions.last_vouched_ns == 20


def test_refused_grant_is_freed_at_once() -> None:
    """It was new in this session, so nobody was ever allowed to read it."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=0)
    assert not retentions.refuse("inc.1.1")
    assert not retentions.refuse("inc.1.1")
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_refused_retention_of_an_earlier_session_is_only_withdrawn() -> None:
    """A reader of the earlier session may remain: rule 10 knows no other reason to free."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    grant(retentions, 1, now_ns=0)
    retentions.begin_session(2, now_ns=10)
    assert not retentions.refuse("inc.1.1")
    assert retentions.refuse("inc.1.2")
    assert not retentions.refuse("inc.1.2")
    assert retentions.take_freed() == []
    assert [one.number for one in retentions.withdrawals()] == [1]
    retentions.expire(now_ns=10 + HOLD_NS)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_retention_that_was_never_offered_is_freed_when_given_up() -> None:
    """There was no session: nobody can be reading, so nobody is waited for."""
    retentions = make()
    retentions.retain(1, offer(), now_ns=0)
    assert not retentions.withdraw(1, PRESSURE)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]
    retentions.retain(2, offer(), now_ns=0)
    retentions.begin_session(1, now_ns=1)
    assert retentions.withdraw(2, PRESSURE)
    assert retentions.take_freed() == []


# --- no retention is ever freed earlier than the lease rules allow -------------------------------

MS = 1_000_000
LONGEST_HOLD_NS = 60_000 * MS
LIMIT = 6


@dataclass
class Believed:
    """What an onlooker who reads every message knows about one retention."""

    retained_ns: int
    retained_in: int
    """The session under way or, between sessions, the last one."""
    vouched_ns: int | None = None
    lease_id: str = ""
    """Its id in the session under way or, between sessions, in the last one."""
    offered: bool = False
    """A message of the session under way named it as held."""
    sessions: set[int] = field(default_factory=set)
    """Sessions that offered it."""
    withdrawn: bool = False


class EngineAgainstModel(RuleBasedStateMachine):
    """An engine, a lease service that says anything at any time, and an onlooker.

    The onlooker knows the rules, not the code: it takes vouching from the messages it sees.
    """

    DURATIONS_MS: ClassVar = st.sampled_from([200, 1_000, 5_000, 20_000])

    def __init__(self) -> None:
        super().__init__()
        self.engine = EngineSession(
            lease_pb2.EngineDescription(engine_id="e", incarnation="inc"),
            Retentions("inc", LIMIT, LONGEST_HOLD_NS),
            lease_pb2.KvMemory,
        )
        self.now_ns = 10**12
        self.numbers = 0
        self.held: dict[int, Believed] = {}
        self.gone_ids: list[str] = []
        self.ids_ever: set[str] = set()
        self.open = False
        self.session_number = 0
        self.sent_sequence = 0
        self.service_sequence = 0
        self.term = 1
        self.heard_term = 0
        self.told_hold_ns = 0
        self.assumed_hold_ns = self.engine.hold_after_vouch_ns

    # What happens.

    @rule(ms=st.sampled_from([0, 1, 50, 250, 1_000, 3_000, 5_000, 9_000, 30_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * MS

    @rule()
    def tick(self) -> None:
        self.grow_old()
        requests = self.engine.tick(self.now_ns)
        self.look_at_freed()  # Before the heartbeat of this tick, which no longer speaks of it.
        self.look_at(requests)
        hold_ns = (self.told_hold_ns or self.assumed_hold_ns) + 1
        for one in self.held.values():
            since_ns = max(one.retained_ns, one.vouched_ns or 0)
            assert self.now_ns < since_ns + hold_ns, "held for longer than the bound"

    @precondition(lambda self: not self.open)
    @rule(new_term=st.booleans())
    def register(self, new_term: bool) -> None:
        self.open = True
        self.session_number += 1
        self.sent_sequence = 0
        self.service_sequence = 0
        self.term += new_term
        for one in self.held.values():
            one.offered = False
        last_vouched_ns = {number: one.vouched_ns for number, one in self.held.items()}
        self.grow_old()
        request = self.engine.open(self.now_ns)
        self.look_at_freed()  # What is too old is not offered again.
        expected = {number for number, one in self.held.items() if not one.withdrawn}
        register = request.register
        assert register.previous_term == self.heard_term
        quiet_ns = register.quiet.ToNanoseconds() if register.HasField("quiet") else None
        self.look_at([request])
        assert {number for number, one in self.held.items() if one.offered} == expected
        for number in expected:
            vouched_ns = last_vouched_ns[number]
            if vouched_ns is not None:
                assert quiet_ns is not None
                assert quiet_ns <= self.now_ns - vouched_ns, "quiet for less long than said"

    @precondition(lambda self: self.open)
    @rule()
    def stream_ends(self) -> None:
        self.engine.close()
        self.open = False

    @precondition(lambda self: self.open and self.service_sequence == 0)
    @rule(ttl_ms=DURATIONS_MS, read_ms=DURATIONS_MS, heartbeat_ms=st.sampled_from([50, 1_000]))
    def service_answers(self, ttl_ms: int, read_ms: int, heartbeat_ms: int) -> None:
        answer = lease_pb2.Registered()
        answer.session_ttl.FromMilliseconds(ttl_ms)
        answer.longest_read.FromMilliseconds(read_ms)
        answer.heartbeat_interval.FromMilliseconds(heartbeat_ms)
        if not self.engine.broken:
            hold_ns = int(DRIFT_MARGIN * (ttl_ms + read_ms) * MS)
            self.told_hold_ns = max(self.told_hold_ns, hold_ns)
        self.receive(registered=answer)
        self.look_at_freed()  # The answer may tell a hold that has run out by now.

    @precondition(lambda self: self.open and self.service_sequence > 0)
    @rule()
    def service_acknowledges(self) -> None:
        self.receive(heartbeat_ack=lease_pb2.HeartbeatAck())

    @precondition(lambda self: self.open and self.service_sequence > 0)
    @rule(data=st.data())
    def service_releases(self, data: st.DataObject) -> None:
        lease_id = self.any_id(data)
        accepted = not self.engine.broken
        self.receive(release=lease_pb2.Release(lease_id=lease_id, reason=PRESSURE))
        self.look_at_freed({lease_id} if accepted else set())

    @precondition(lambda self: self.open and self.service_sequence > 0)
    @rule(data=st.data())
    def service_refuses(self, data: st.DataObject) -> None:
        lease_id = self.any_id(data)
        accepted = not self.engine.broken
        freeable = set()
        for one in self.held.values():
            if one.retained_in == self.session_number:
                assert one.sessions <= {self.session_number}
                freeable.add(one.lease_id)
            elif accepted and one.offered and one.lease_id == lease_id:
                one.withdrawn = True
        self.receive(grant_refused=lease_pb2.GrantRefused(lease_id=lease_id))
        self.look_at_freed({lease_id} & freeable if accepted else set())

    @rule(data=st.data(), wrong=st.sampled_from(["session", "sequence", "term"]))
    def service_is_misunderstood(self, data: st.DataObject, wrong: str) -> None:
        """A release that must not be obeyed: of another session, out of order, another term."""
        lease_id = self.any_id(data)
        response = lease_pb2.EngineSessionResponse(
            term=self.term + (wrong == "term"),
            sequence=self.service_sequence + 1 + (wrong == "sequence"),
            session_number=self.session_number + (wrong == "session"),
            release=lease_pb2.Release(lease_id=lease_id, reason=PRESSURE),
        )
        if self.service_sequence == 0 and wrong == "term":
            return
        self.look_at(self.engine.receive(response, self.now_ns))
        self.look_at_freed()

    @rule()
    def request_finishes(self) -> None:
        self.numbers += 1
        full = len(self.held) >= LIMIT
        if not full:
            self.held[self.numbers] = Believed(self.now_ns, self.session_number)
        self.look_at(self.engine.retain(self.numbers, offer(), self.now_ns))
        freed = self.engine.retentions.take_freed()
        assert [one.number for one in freed] == [self.numbers] * full

    @rule(data=st.data())
    def engine_withdraws(self, data: st.DataObject) -> None:
        numbers = data.draw(st.sets(st.integers(1, self.numbers + 1), max_size=3))
        for number in numbers & set(self.held):
            self.held[number].withdrawn = True
        reasons = dict.fromkeys(sorted(numbers), PRESSURE)
        self.look_at(self.engine.withdraw_all(reasons, self.now_ns))
        self.look_at_freed()

    @rule(data=st.data())
    def readers_give_notice(self, data: st.DataObject) -> None:
        lease_id = self.any_id(data)
        self.look_at(self.engine.notice(lease_id), noticed=lease_id)
        self.look_at_freed({lease_id})

    # What the onlooker sees.

    def any_id(self, data: st.DataObject) -> str:
        ids = [one.lease_id for one in self.held.values() if one.lease_id]
        return data.draw(st.sampled_from([*ids, *self.gone_ids[-3:], "inc.1.99"]))

    def receive(self, **message: object) -> None:
        self.service_sequence += 1
        response = lease_pb2.EngineSessionResponse(
            term=self.term,
            sequence=self.service_sequence,
            session_number=self.session_number,
            **message,  # type: ignore[arg-type]
        )
        if not self.engine.broken:
            self.heard_term = self.term
        self.look_at(self.engine.receive(response, self.now_ns))

    def look_at(
        self, requests: list[lease_pb2.EngineSessionRequest], noticed: str | None = None
    ) -> None:
        for request in requests:
            self.sent_sequence += 1
            assert self.open
            assert request.sequence == self.sent_sequence
            assert request.session_number == self.session_number
            kind = request.WhichOneof("message")
            if kind == "register":
                for retention in request.register.inventory:
                    self.offer(retention.lease_id)
            elif kind == "grant":
                self.offer(request.grant.retention.lease_id)
            elif kind == "heartbeat":
                self.look_at_heartbeat(request.heartbeat)
            else:
                assert request.freed.lease_id == noticed

    def offer(self, lease_id: str) -> None:
        incarnation, number, session_number = lease_id.split(".")
        assert (incarnation, session_number) == ("inc", str(self.session_number))
        assert lease_id not in self.ids_ever
        self.ids_ever.add(lease_id)
        one = self.held[int(number)]
        assert not one.withdrawn
        if one.lease_id:
            self.gone_ids.append(one.lease_id)
        one.lease_id = lease_id
        one.vouched_ns = self.now_ns
        one.offered = True
        one.sessions.add(self.session_number)

    def look_at_heartbeat(self, heartbeat: lease_pb2.Heartbeat) -> None:
        assert (heartbeat.echo_term, heartbeat.echo_sequence) == (self.term, self.service_sequence)
        self.grow_old()
        there = {one.number for one in self.engine.retentions}
        offered = [one for number, one in self.held.items() if one.offered and number in there]
        named = {one.lease_id for one in heartbeat.withdrawn}
        assert named == {one.lease_id for one in offered if one.withdrawn}
        for one in offered:
            if not one.withdrawn:
                one.vouched_ns = self.now_ns

    def grow_old(self) -> None:
        """What has reached its longest hold is given up before anything is vouched for."""
        for one in self.held.values():
            one.withdrawn |= self.now_ns >= one.retained_ns + LONGEST_HOLD_NS

    def overdue(self, one: Believed) -> bool:
        return one.vouched_ns is None or self.now_ns >= one.vouched_ns + self.told_hold_ns

    def look_at_freed(self, by_name: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Nothing is freed but by its current name, or K*(TTL + R) after the last vouching."""
        for freed in self.engine.retentions.take_freed():
            one = self.held.pop(freed.number)
            assert one.lease_id in by_name or self.overdue(one), "freed too early"
            if one.lease_id:
                self.gone_ids.append(one.lease_id)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert {one.number for one in self.engine.retentions} == set(self.held)
        withdrawn = {one.number for one in self.engine.retentions if one.withdrawn}
        assert withdrawn == {number for number, one in self.held.items() if one.withdrawn}


EngineAgainstModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
test_no_retention_is_freed_earlier_than_allowed = EngineAgainstModel.TestCase
