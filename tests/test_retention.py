"""What a decode engine holds, under which lease ids, and when it may let go."""

from __future__ import annotations

import pytest

from kvturn.v1 import common_pb2
from kvturn_connector.retention import DRIFT, DRIFT_MARGIN, Freed, Retentions

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
    retentions.retain(1, offer(), now_ns=1)
    assert lease_ids(retentions.begin_session(2, now_ns=2)) == ["inc.1.2"]
    assert not retentions.free("inc.1.1", CONSUMED)
    assert retentions.take_freed() == []
    assert retentions.free("inc.1.2", CONSUMED)
    assert retentions.take_freed() == [Freed(1, CONSUMED)]


def test_freed_retention_is_struck_at_once() -> None:
    """Rule 12: it is in no later inventory, and is handed out for freeing once."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    retentions.retain(1, offer(), now_ns=1)
    retentions.retain(2, offer(), now_ns=1)
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
    retentions.retain(1, offer(), now_ns=1)
    assert retentions.withdraw(1, PRESSURE)
    assert retentions.take_freed() == []
    assert len(retentions) == 1
    assert retentions.begin_session(2, now_ns=2) == []
    assert retentions.take_freed() == []


def test_withdrawal_is_said_until_its_session_ends() -> None:
    """Rule 11: the ids of another session mean nothing to the lease service."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    retentions.retain(1, offer(), now_ns=1)
    retentions.retain(2, offer(), now_ns=1)
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
    retentions.retain(1, offer(), now_ns=1)
    retentions.withdraw(1, PRESSURE)
    assert retentions.free("inc.1.1", PRESSURE)
    assert retentions.withdrawals() == []
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_withdrawing_again_keeps_the_first_reason() -> None:
    """The clock of case (c) is not started again either."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    retentions.retain(1, offer(), now_ns=0)
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
    retentions.retain(1, offer(), now_ns=50)
    retentions.expire(now_ns=149)
    assert len(retentions) == 1
    retentions.expire(now_ns=150)
    assert retentions.take_freed() == [Freed(1, ENGINE_LOST)]


def test_heartbeat_vouches_for_all_that_is_not_withdrawn() -> None:
    """Rule 10 (c), with the clock of the withdrawn one running from before its withdrawal."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    retentions.retain(1, offer(), now_ns=0)
    retentions.retain(2, offer(), now_ns=0)
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
    retentions.retain(1, offer(), now_ns=0)
    retentions.retain(2, offer(), now_ns=0)
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
    retentions.retain(1, offer(), now_ns=5)
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
    retentions.retain(1, offer(), now_ns=0)
    retentions.expire(now_ns=HOLD_NS - 1)
    assert len(retentions) == 1


def test_hold_grows_for_what_is_held_already() -> None:
    """The lease service that is about to trust the engine trusts it for longer."""
    retentions = make()
    retentions.retain(1, offer(), now_ns=0)
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
    retentions.retain(1, offer(), now_ns=10)
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
    retentions.retain(1, offer(), now_ns=0)
    assert not retentions.refuse("inc.1.1")
    assert not retentions.refuse("inc.1.1")
    assert retentions.take_freed() == [Freed(1, PRESSURE)]


def test_refused_retention_of_an_earlier_session_is_only_withdrawn() -> None:
    """A reader of the earlier session may remain: rule 10 knows no other reason to free."""
    retentions = make()
    retentions.begin_session(1, now_ns=0)
    retentions.retain(1, offer(), now_ns=0)
    retentions.begin_session(2, now_ns=10)
    assert not retentions.refuse("inc.1.1")
    assert retentions.refuse("inc.1.2")
    assert not retentions.refuse("inc.1.2")
    assert retentions.take_freed() == []
    assert [one.number for one in retentions.withdrawals()] == [1]
    retentions.expire(now_ns=10 + HOLD_NS)
    assert retentions.take_freed() == [Freed(1, PRESSURE)]
