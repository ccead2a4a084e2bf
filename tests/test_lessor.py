"""Scenarios of the lease rules on the lessor, with hand-made time."""

from __future__ import annotations

import pytest
from lessor_bench import CONFIG, INHERIT_BOUND, READER_BOUND, TERM, TTL, Bench, Decode, R, S, key

from kvturn_lease.config import LessorConfig
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import (
    HeartbeatAck,
    Registered,
)
from kvturn_lease.errors import (
    ConversationNotFound,
    EnginesExhausted,
    IncarnationInUse,
    InvalidArgument,
    LeaseNotFound,
    LeaseServiceError,
    SequenceGap,
    SessionExpired,
    SessionFenced,
)
from kvturn_lease.lease import LeaseId, LeaseState, Retention
from kvturn_lease.session import EngineInfo, KvMemory, SessionId
from kvturn_lease.store import MemoryStore, SessionOpened
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def decode(bench: Bench) -> Decode:
    """An engine with a trusted session and nothing retained."""
    return Decode(bench).up()


# ---- sessions and trust (rules 2 to 5) -------------------------------------------------------


def test_each_message_is_numbered_and_answered(bench: Bench) -> None:
    """Register is answered by message 1, each heartbeat by the next one."""
    decode = Decode(bench).up()
    bench.wait(S)
    decode.beat()
    kinds = [type(effect.message) for effect in decode.received]
    assert kinds == [Registered, HeartbeatAck, HeartbeatAck]
    assert [effect.sequence for effect in decode.received] == [1, 2, 3]


def test_a_register_alone_grants_no_read(bench: Bench) -> None:
    """A Register may have waited anywhere; only the echo of our answer proves life."""
    decode = Decode(bench)
    decode.register()
    lease_id = decode.grant(1)
    assert bench.resolve() == Verdict.NO_LEASE
    assert bench.begin(lease_id) == Verdict.NO_LEASE
    decode.beat()
    assert bench.resolve() == Verdict.NONE
    assert bench.begin(lease_id) == Verdict.NONE


def test_trust_counts_from_when_the_echoed_message_was_sent(bench: Bench) -> None:
    """A heartbeat that arrives 3 s late still ends trust TTL after the message it echoes."""
    decode = Decode(bench)
    decode.register()
    bench.wait(3 * S)
    decode.beat(echo=1)
    bench.wait(TTL - 3 * S - 1)
    assert not bench.ended
    bench.wait(1)
    assert isinstance(bench.ended[0].error, SessionExpired)


def test_a_heartbeat_past_the_deadline_raises_nobody(bench: Bench, decode: Decode) -> None:
    """The deadline is looked at before the heartbeat, even if no timer fired; dead stays dead."""
    lease_id = decode.grant(1)
    bench.now += TTL  # no expire() in between
    with pytest.raises(SessionExpired):
        decode.beat()
    with pytest.raises(SessionExpired):
        decode.beat()
    assert bench.begin(lease_id) == Verdict.ENGINE_LOST


def test_a_read_asked_for_past_the_deadline_is_refused(bench: Bench, decode: Decode) -> None:
    """Trust that ran out counts at once, without waiting for a timer."""
    lease_id = decode.grant(1)
    bench.now += TTL - 1
    assert bench.resolve() == Verdict.NONE
    bench.now += 1
    assert bench.resolve() == Verdict.ENGINE_LOST
    assert bench.begin(lease_id) == Verdict.ENGINE_LOST


@pytest.mark.parametrize("term", [0, TERM + 1])
def test_an_echo_of_another_term_extends_nothing(bench: Bench, term: int) -> None:
    """A heartbeat that echoes what another lessor sent says nothing about our messages."""
    decode = Decode(bench)
    decode.register()
    lease_id = decode.grant(1)
    decode.beat(echo=1, term=term)
    assert bench.begin(lease_id) == Verdict.NO_LEASE
    bench.wait(TTL)
    assert isinstance(bench.ended[0].error, SessionExpired)


def test_heartbeats_keep_a_session_for_as_long_as_they_come(bench: Bench, decode: Decode) -> None:
    bench.touch(1)
    decode.grant(1)
    bench.wait(100 * S, decode)
    assert bench.resolve() == Verdict.NONE
    assert not bench.ended


def test_an_echo_of_a_message_that_was_not_sent_is_malformed(decode: Decode) -> None:
    with pytest.raises(InvalidArgument, match=r"heartbeat\.echo_sequence"):
        decode.beat(echo=1_000)


def test_an_echo_of_nothing_proves_nothing(bench: Bench) -> None:
    decode = Decode(bench)
    decode.register()
    lease_id = decode.grant(1)
    decode.beat(echo=0)
    assert bench.begin(lease_id) == Verdict.NO_LEASE


def test_many_messages_between_heartbeats_never_lengthen_trust(
    bench: Bench, decode: Decode
) -> None:
    """More messages than have their time noted: the echo counts from an earlier one."""
    for number in range(2_000):
        bench.now += 1_000_000
        lease_id = decode.grant(number, f"c{number}")
        bench.lessor.revoke(lease_id, bench.now)
        bench.carry_out()
    sent_ns = bench.now
    bench.wait(S)
    decode.beat()
    bench.wait(TTL)
    assert bench.ended
    assert bench.now >= sent_ns + TTL


def test_a_gap_in_the_sequence_ends_the_session(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1)
    decode.sequence += 1
    with pytest.raises(SequenceGap):
        decode.beat()
    assert bench.begin(lease_id) == Verdict.ENGINE_LOST


def test_a_repeated_message_ends_the_session(decode: Decode) -> None:
    decode.sequence -= 1
    with pytest.raises(SequenceGap):
        decode.beat()


def test_a_newer_register_fences_the_older_session(bench: Bench, decode: Decode) -> None:
    """The engine connects anew before the old stream is known to be gone."""
    old_id = decode.session_id
    decode.up(previous_term=TERM)
    assert [(end.session, type(end.error)) for end in bench.ended] == [(old_id, SessionFenced)]
    with pytest.raises(SessionFenced):
        bench.lessor.grant(old_id, 3, decode.retention(1), bench.now)
    bench.lessor.close_session(old_id, bench.now)  # its stream ends late
    lease_id = decode.grant(1)
    assert bench.begin(lease_id) == Verdict.NONE


@pytest.mark.parametrize("number", [0, 1])
def test_a_register_needs_a_higher_number(decode: Decode, number: int) -> None:
    decode.up(previous_term=TERM)
    decode.number = number
    with pytest.raises(SessionFenced):
        decode.register()


def test_a_session_number_stays_used_after_the_session(bench: Bench, decode: Decode) -> None:
    decode.drop_stream()
    decode.number = 0
    with pytest.raises(SessionFenced):
        decode.register()


def test_a_new_incarnation_loses_all_and_fences_the_old_for_ever(
    bench: Bench, decode: Decode
) -> None:
    """A restarted engine starts from session 1; its frozen predecessor wakes up afterwards."""
    lease_id = decode.grant(1)
    restarted = Decode(bench, "d1", "second").up()
    assert bench.begin(lease_id) == Verdict.ENGINE_LOST
    assert bench.resolve() == Verdict.ENGINE_LOST
    with pytest.raises(SessionFenced):
        decode.beat()
    with pytest.raises(SessionFenced):
        decode.register()
    restarted.grant(1)
    assert bench.resolve() == Verdict.NONE


def test_a_register_that_outlived_its_engine_does_not_fence_the_next_one(
    bench: Bench, decode: Decode
) -> None:
    """The service was frozen while an engine registered, died, and registered anew.

    It reads the two streams in any order; the dead engine's Register, though it comes last,
    proves nothing, and the living engine comes back.
    """
    restarted = Decode(bench, "d1", "second").up()
    lease_id = restarted.grant(1)
    Decode(bench, "d1", "between").register()
    with pytest.raises(SessionFenced):
        restarted.beat()
    restarted.up(previous_term=TERM)
    with pytest.raises(SessionFenced):
        decode.register()  # fenced by an engine that did echo
    with pytest.raises(SessionFenced):
        Decode(bench, "d1", "between").register()
    assert bench.begin(lease_id) != Verdict.NONE


def test_two_engines_cannot_share_an_incarnation(bench: Bench, decode: Decode) -> None:
    """Their lease ids would be the same."""
    with pytest.raises(IncarnationInUse):
        Decode(bench, "d2", decode.incarnation).register()


def test_a_closed_stream_ends_the_session(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1)
    decode.drop_stream()
    assert bench.begin(lease_id) == Verdict.ENGINE_LOST
    assert bench.lessor.list_engines(bench.now) == []
    with pytest.raises(SessionExpired):
        decode.beat()


def test_a_refused_register_changes_nothing(bench: Bench, decode: Decode) -> None:
    """Malformed inventories leave the session that is there as it was."""
    decode.grant(1)
    number = decode.number
    twice = SessionId("d1", decode.incarnation, number + 1)
    info = EngineInfo("", True, b"", b"")
    bad = [
        [decode.retention(2)],  # an id of the old session
        [Retention(LeaseId("other", 2, number + 1), key(), 1, 1, 0, b"x")],
        [Retention(LeaseId(decode.incarnation, 2, number + 1), key(), 1, 1, 0, b"x")] * 2,
        [Retention(LeaseId(decode.incarnation, 1, number + 1), key("other"), 1, 1, 0, b"x")],
    ]
    for inventory in bad:
        with pytest.raises(InvalidArgument, match=r"register\.inventory\[\d\]\."):
            bench.lessor.register(
                twice, info, inventory, quiet_ns=0, previous_term=TERM, now_ns=bench.now
            )
    assert bench.lessor.drain() == []
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


# ---- inherited leases (rule 7) ---------------------------------------------------------------


def test_an_inherited_lease_waits_before_it_is_granted(bench: Bench) -> None:
    """A reader of an earlier term may remain until K*(TTL + R) after the Register."""
    decode = Decode(bench).up((1, "c"), previous_term=5)
    bench.wait(INHERIT_BOUND - 1, decode)
    assert bench.resolve() == Verdict.NO_LEASE
    assert bench.begin(decode.lease_id(1)) == Verdict.NO_LEASE
    bench.wait(1, decode)
    assert bench.resolve() == Verdict.NONE
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


def test_an_inherited_lease_waits_before_its_release_is_confirmed(bench: Bench) -> None:
    """The engine withdraws, and the client ends: neither frees blocks that may be read."""
    decode = Decode(bench).up((1, "c"), (2, "other"), previous_term=5)
    decode.beat((1, ReleaseReason.PRESSURE))
    bench.end_conversation("other")
    bench.wait(INHERIT_BOUND - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.PRESSURE), (2, ReleaseReason.ENDED)]


def test_quiet_time_shortens_the_wait(bench: Bench) -> None:
    """The engine has not vouched for anything for 5 s, so earlier grants are older still."""
    decode = Decode(bench)
    decode.register((1, "c"), quiet_ns=5 * S, previous_term=5)
    decode.beat()
    bench.wait(INHERIT_BOUND - 5 * S - 1)
    assert bench.resolve() == Verdict.NO_LEASE
    bench.wait(1)
    assert bench.resolve() == Verdict.NONE


def test_readers_of_a_term_with_a_longer_read_are_waited_for(bench: Bench) -> None:
    """The service was restarted with a shorter longest read; the engine tells what it was."""
    decode = Decode(bench)
    hold_ns = INHERIT_BOUND + 7 * S
    decode.register((1, "c"), quiet_ns=2 * S, hold_ns=hold_ns, previous_term=5)
    decode.beat()
    bench.end_conversation("c")
    bench.wait(hold_ns - 2 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.ENDED)]


@pytest.mark.parametrize("quiet_ns", [None, 100 * S])
def test_nothing_waits_that_nobody_can_be_reading(bench: Bench, quiet_ns: int | None) -> None:
    """Never vouched for, or so long ago that every reader is done."""
    decode = Decode(bench)
    decode.register((1, "c"), quiet_ns=quiet_ns, previous_term=5)
    decode.beat()
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


def test_leases_of_the_same_term_do_not_wait(bench: Bench, decode: Decode) -> None:
    """The stream broke and came back; this lessor knows all that was granted.

    Retention 2's Grant was lost with the stream, so nobody can have read it either.
    """
    decode.grant(1)
    decode.drop_stream()
    bench.wait(S)
    decode.up((1, "c"), (2, "other"), previous_term=TERM)
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE
    assert bench.begin(decode.lease_id(2), "other") == Verdict.NONE


def test_an_inherit_wait_outlasts_a_reconnect(bench: Bench) -> None:
    """Registering again with the same term must not shorten the first one's wait."""
    decode = Decode(bench).up((1, "c"), previous_term=5)
    bench.wait(S)
    decode.up((1, "c"), previous_term=TERM)
    bench.wait(INHERIT_BOUND - S - 1, decode)
    assert bench.begin(decode.lease_id(1)) == Verdict.NO_LEASE
    bench.wait(1, decode)
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


def test_a_visit_to_another_term_makes_leases_wait_again(bench: Bench, decode: Decode) -> None:
    """Another leader may have granted what this one knows as unread."""
    decode.grant(1)
    decode.drop_stream()
    decode.number += 1  # a session that this lessor never saw
    decode.up((1, "c"), previous_term=9)
    assert bench.begin(decode.lease_id(1)) == Verdict.NO_LEASE
    bench.wait(INHERIT_BOUND, decode)
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


@pytest.mark.parametrize("previous_term", [TERM, 9])
def test_a_begun_lease_stays_begun(bench: Bench, decode: Decode, previous_term: int) -> None:
    """Under its new id it is still being read; it is released when that reader is done."""
    first_id = decode.grant(1)
    assert bench.begin(first_id) == Verdict.NONE
    decode.drop_stream()
    decode.up((1, "c"), previous_term=previous_term)
    assert bench.resolve() == Verdict.READ_IN_PROGRESS
    assert bench.begin(decode.lease_id(1)) == Verdict.READ_IN_PROGRESS
    bench.end_read(decode.lease_id(1))  # not the id that the read began under
    assert bench.begin(decode.lease_id(1)) == Verdict.READ_IN_PROGRESS
    bench.end_read(first_id)
    bench.wait(INHERIT_BOUND, decode)
    assert decode.releases() == [(1, ReleaseReason.CONSUMED)]
    assert bench.resolve() == Verdict.CONSUMED


def test_a_read_that_ends_while_its_engine_is_away_is_remembered(
    bench: Bench, decode: Decode
) -> None:
    first_id = decode.grant(1)
    bench.begin(first_id)
    decode.drop_stream()
    bench.end_read(first_id, ReadOutcome.FAILED)
    decode.up((1, "c"), previous_term=TERM)
    assert decode.releases() == [(1, ReleaseReason.READ_FAILED)]


def test_a_lease_that_ended_while_its_engine_was_away_is_released_on_return(
    bench: Bench, decode: Decode
) -> None:
    decode.grant(1)
    decode.drop_stream()
    assert bench.end_conversation() == 1
    decode.up((1, "c"), previous_term=TERM)
    assert decode.releases() == [(1, ReleaseReason.ENDED)]


def test_a_release_that_was_lost_with_the_stream_is_sent_again(
    bench: Bench, decode: Decode
) -> None:
    """The engine never heard of it and lists the retention again: it must not come back."""
    lease_id = decode.grant(1)
    assert bench.begin(lease_id) == Verdict.NONE
    bench.end_read(lease_id, ReadOutcome.NOT_READ)
    assert decode.releases() == [(1, ReleaseReason.READ_FAILED)]
    decode.drop_stream()
    decode.up((1, "c"), previous_term=TERM)
    assert decode.releases() == [(1, ReleaseReason.READ_FAILED)]
    assert bench.begin(decode.lease_id(1)) == Verdict.CONSUMED


def test_what_an_engine_no_longer_lists_has_ended(bench: Bench, decode: Decode) -> None:
    """Freed while away: on the notice of its reader, or because the memory was needed."""
    bench.begin(decode.grant(1, "read"), "read")
    decode.grant(2, "unread")
    decode.drop_stream()
    decode.up(previous_term=TERM)
    assert bench.resolve("read") == Verdict.CONSUMED
    assert bench.resolve("unread") == Verdict.RELEASED
    assert decode.releases() == []


def test_an_engine_that_stays_away_is_forgotten(bench: Bench, decode: Decode) -> None:
    """Its leases end as ENGINE_LOST; should it come back after all, they wait like foreign ones."""
    decode.grant(1)
    decode.drop_stream()
    bench.wait(CONFIG.away_memory_ns)
    assert bench.resolve() == Verdict.ENGINE_LOST
    decode.up((1, "c"), previous_term=TERM)
    assert bench.begin(decode.lease_id(1)) == Verdict.NO_LEASE
    bench.wait(INHERIT_BOUND, decode)
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


def test_of_two_inherited_retentions_the_later_turn_stays(bench: Bench) -> None:
    """Two engines list the same conversation after a failover, in either order."""
    one, two = Decode(bench, "d1"), Decode(bench, "d2")
    one.number, two.number = 3, 3
    one.register(one_retention := Retention(LeaseId("inc-d1", 1, 4), key(), 64, 4, 5, b"x"))
    two.register(Retention(LeaseId("inc-d2", 1, 4), key(), 900, 9, 4, b"x"))
    assert two.releases() == [(1, ReleaseReason.SUPERSEDED)]
    one.beat()
    assert bench.lessor.resolve(key(), bench.now).lease_id == one_retention.lease_id
    three = Decode(bench, "d3")
    three.register(Retention(LeaseId("inc-d3", 1, 1), key(), 64, 4, 6, b"x"))
    assert one.releases() == [(1, ReleaseReason.SUPERSEDED)]


def test_an_older_turn_that_is_inherited_waits_for_its_readers_too(bench: Bench) -> None:
    two = Decode(bench, "d2").up()
    two.grant(1, turn=9)
    one = Decode(bench, "d1")
    one.register(
        Retention(LeaseId("inc-d1", 1, 1), key(), 64, 4, 5, b"x"), quiet_ns=0, previous_term=5
    )
    one.beat()
    assert one.releases() == []
    bench.wait(INHERIT_BOUND, one, two)
    assert one.releases() == [(1, ReleaseReason.SUPERSEDED)]


# ---- reads (rules 6, 8, 9) -------------------------------------------------------------------


def test_a_lease_is_read_once(bench: Bench, decode: Decode) -> None:
    """Two turns race, a retry comes, and all but the first are told why not."""
    lease_id = decode.grant(1)
    assert bench.begin(lease_id) == Verdict.NONE
    assert bench.begin(lease_id) == Verdict.READ_IN_PROGRESS
    assert bench.resolve() == Verdict.READ_IN_PROGRESS
    bench.end_read(lease_id)
    assert bench.begin(lease_id) == Verdict.CONSUMED
    assert bench.resolve() == Verdict.CONSUMED


def test_the_reader_gets_what_was_announced(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1)
    answer = bench.lessor.begin_read(lease_id, key(), bench.now)
    assert (answer.payload, answer.nixl) == (b"blocks of 1", b"nixl")


def test_a_lease_is_not_read_for_another_conversation(bench: Bench, decode: Decode) -> None:
    """Nor does the attempt use it up."""
    lease_id = decode.grant(1)
    assert bench.begin(lease_id, "other") == Verdict.NO_LEASE
    foreign = ConversationKey("another tenant", "model", "c")
    refused = bench.lessor.begin_read(lease_id, foreign, bench.now)
    assert refused.verdict == Verdict.NO_LEASE
    assert bench.begin(lease_id) == Verdict.NONE


def test_a_lease_nobody_granted_is_not_read(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    assert bench.begin(LeaseId("unknown", 1, 1), "unknown") == Verdict.NO_LEASE
    assert bench.begin(LeaseId(decode.incarnation, 1, 9)) == Verdict.NO_LEASE


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ReadOutcome.COMPLETED, ReleaseReason.CONSUMED),
        (ReadOutcome.NOT_READ, ReleaseReason.READ_FAILED),
        (ReadOutcome.FAILED, ReleaseReason.READ_FAILED),
        (ReadOutcome.TOO_LONG, ReleaseReason.READ_FAILED),
    ],
)
def test_a_read_lease_is_released_when_its_read_ends(
    bench: Bench, decode: Decode, outcome: ReadOutcome, reason: ReleaseReason
) -> None:
    """Whatever the outcome: a retention is not offered twice."""
    lease_id = decode.grant(1)
    bench.begin(lease_id)
    assert decode.releases() == []
    bench.end_read(lease_id, outcome)
    bench.end_read(lease_id, outcome)
    assert decode.releases() == [(1, reason)]
    assert bench.resolve() == Verdict.CONSUMED


def test_a_reader_that_vanished_holds_the_blocks_for_k_times_r(
    bench: Bench, decode: Decode
) -> None:
    lease_id = decode.grant(1)
    bench.begin(lease_id)
    bench.wait(READER_BOUND - 1, decode)
    assert decode.releases() == []
    assert bench.resolve() == Verdict.READ_IN_PROGRESS
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.READ_FAILED)]
    assert bench.begin(lease_id) == Verdict.CONSUMED
    bench.end_read(lease_id)  # too late to matter


def test_no_end_releases_blocks_that_are_being_read(bench: Bench, decode: Decode) -> None:
    """Withdrawn, ended, revoked or superseded during the read: the release comes after it."""
    ends = {
        "withdrawn": lambda number: decode.beat((number, ReleaseReason.PRESSURE)),
        "ended": lambda number: bench.end_conversation("ended"),
        "revoked": lambda number: bench.lessor.revoke(decode.lease_id(number), bench.now),
        "superseded": lambda number: decode.grant(number + 100, "superseded"),
    }
    for number, (name, end) in enumerate(ends.items()):
        assert bench.begin(decode.grant(number, name), name) == Verdict.NONE
        end(number)
        bench.carry_out()
    assert decode.releases() == []
    assert bench.begin(decode.lease_id(0), "withdrawn") == Verdict.READ_IN_PROGRESS
    bench.end_read(decode.lease_id(0))
    assert decode.releases() == [(0, ReleaseReason.PRESSURE)]
    bench.wait(READER_BOUND, decode)
    assert [number for number, _ in decode.releases()] == [0, 1, 2, 3]


def test_the_engine_may_free_on_its_readers_notice(bench: Bench, decode: Decode) -> None:
    """The notice overtakes EndRead: nothing is left to release."""
    lease_id = decode.grant(1)
    bench.begin(lease_id)
    decode.freed(1)
    bench.end_read(lease_id)
    assert decode.releases() == []
    assert bench.resolve() == Verdict.CONSUMED
    decode.freed(1)  # crossed the release of the same lease
    with pytest.raises(LeaseNotFound):
        bench.lessor.get_lease(lease_id, bench.now)


def test_the_id_of_an_older_session_is_not_read(bench: Bench, decode: Decode) -> None:
    """The engine registered again after the router had resolved the conversation."""
    stale_id = decode.grant(1)
    decode.up((1, "c"), previous_term=TERM)
    assert bench.begin(stale_id) == Verdict.NO_LEASE
    assert bench.begin(decode.lease_id(1)) == Verdict.NONE


# ---- withdrawals (rule 11) -------------------------------------------------------------------


def test_a_withdrawn_lease_is_released_at_once_if_nobody_reads(
    bench: Bench, decode: Decode
) -> None:
    lease_id = decode.grant(1)
    decode.beat((1, ReleaseReason.PRESSURE))
    assert decode.releases() == [(1, ReleaseReason.PRESSURE)]
    assert bench.begin(lease_id) == Verdict.RELEASED


def test_a_withdrawal_is_answered_for_as_long_as_it_is_repeated(decode: Decode) -> None:
    """Also for a lease that was never granted here, e.g. because its grant was refused."""
    decode.beat((8, ReleaseReason.EXPIRED))
    decode.beat((8, ReleaseReason.EXPIRED))
    assert decode.releases() == [(8, ReleaseReason.EXPIRED)] * 2


def test_the_first_reason_for_an_end_stays(bench: Bench, decode: Decode) -> None:
    bench.begin(decode.grant(1))
    bench.end_conversation()
    decode.beat((1, ReleaseReason.PRESSURE))
    bench.wait(READER_BOUND, decode)
    assert decode.releases() == [(1, ReleaseReason.ENDED)]


def test_ids_of_other_sessions_are_malformed(bench: Bench, decode: Decode) -> None:
    foreign = LeaseId(decode.incarnation, 1, decode.number + 1)
    other = LeaseId("other", 1, decode.number)
    for sequence, lease_id in enumerate((foreign, other), start=decode.sequence + 1):
        with pytest.raises(InvalidArgument, match=r"freed\.lease_id"):
            bench.lessor.freed(
                decode.session_id, sequence, lease_id, ReleaseReason.CONSUMED, bench.now
            )


# ---- idle, hold, and other ends --------------------------------------------------------------


def test_a_silent_conversation_becomes_idle(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    bench.wait(60 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]
    assert bench.resolve() == Verdict.RELEASED


@pytest.mark.parametrize("sign", ["resolve", "touch", "keep_alive"])
def test_a_sign_of_life_keeps_it(bench: Bench, decode: Decode, sign: str) -> None:
    decode.grant(1)
    bench.wait(50 * S, decode)
    if sign == "resolve":
        bench.resolve()
    elif sign == "touch":
        bench.touch(0)
    else:
        bench.lessor.keep_alive(key(), None, bench.now)
    bench.wait(60 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_a_turn_in_flight_is_not_idle(bench: Bench, decode: Decode) -> None:
    bench.touch(1)
    bench.touch(1)
    decode.grant(1)
    bench.wait(200 * S, decode)
    bench.touch(-1)
    bench.wait(100 * S, decode)
    assert decode.releases() == []
    bench.touch(-1)
    bench.wait(60 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_a_turn_of_a_living_router_counts_however_long_it_takes(
    bench: Bench, decode: Decode
) -> None:
    """Its session would have ended with its router; another turn comes and goes meanwhile."""
    bench.lessor.begin_turn(key(), False, bench.now)
    bench.wait(CONFIG.idle_ns + CONFIG.max_hold_ns + S, decode)
    bench.lessor.begin_turn(key(), False, bench.now)
    bench.lessor.end_turn(key(), bench.now)
    decode.grant(1)
    bench.wait(2 * CONFIG.idle_ns, decode)
    assert decode.releases() == []
    bench.lessor.end_turn(key(), bench.now)
    bench.wait(CONFIG.idle_ns + S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_turns_in_flight_never_fall_below_zero(bench: Bench, decode: Decode) -> None:
    """A turn's end whose begin was lost must not make the next turn look like none."""
    bench.touch(-1)
    bench.touch(1)
    decode.grant(1)
    bench.wait(100 * S, decode)
    assert decode.releases() == []


def test_turns_may_be_reported_several_at_once(bench: Bench, decode: Decode) -> None:
    bench.touch(3)
    bench.touch(-2)
    decode.grant(1)
    bench.wait(100 * S, decode)
    assert decode.releases() == []
    bench.touch(-1)
    bench.wait(60 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_the_turns_of_a_router_that_died_do_not_count_for_ever(
    bench: Bench, decode: Decode
) -> None:
    """Their ends are never reported; after the longest hold in silence they are forgotten."""
    bench.touch(1)
    bench.wait(60 * S + 480 * S, decode)
    bench.touch(1)
    decode.grant(1)
    bench.touch(-1)
    bench.wait(60 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_a_declared_absence_lasts_as_long_as_declared(bench: Bench, decode: Decode) -> None:
    """Longer than the idle time or shorter; the newest declaration counts."""
    decode.grant(1)
    assert bench.lessor.keep_alive(key(), 200 * S, bench.now) == 200 * S
    bench.wait(199 * S, decode)
    assert bench.lessor.keep_alive(key(), 10 * S, bench.now) == 10 * S
    bench.wait(10 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_a_grant_does_not_shorten_a_declared_absence(bench: Bench, decode: Decode) -> None:
    """The client declares it the moment its turn ends, before the grant has arrived."""
    bench.touch(1)
    bench.lessor.keep_alive(key(), 200 * S, bench.now)
    bench.touch(-1)
    decode.grant(1)
    bench.wait(199 * S, decode)
    assert decode.releases() == []


def test_a_new_turn_ends_a_declared_absence(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    bench.lessor.keep_alive(key(), 400 * S, bench.now)
    bench.resolve()
    bench.wait(60 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_an_absence_is_cut_to_the_longest_hold(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    bench.wait(10 * S, decode)
    assert bench.lessor.keep_alive(key(), 10_000 * S, bench.now) == 470 * S


def test_keeping_alive_what_is_not_held(bench: Bench) -> None:
    with pytest.raises(ConversationNotFound):
        bench.lessor.keep_alive(key(), None, bench.now)
    bench.resolve()
    assert bench.lessor.keep_alive(key(), 30 * S, bench.now) == 0


def test_the_longest_hold_ends_a_lease_whatever_its_client_does(
    bench: Bench, decode: Decode
) -> None:
    bench.touch(1)
    decode.grant(1)
    bench.wait(480 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.EXPIRED)]
    assert bench.resolve() == Verdict.EXPIRED


def test_a_hold_goes_on_over_a_reconnect(bench: Bench, decode: Decode) -> None:
    bench.touch(1)
    decode.grant(1)
    bench.wait(400 * S, decode)
    decode.up((1, "c"), previous_term=TERM)
    bench.wait(80 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.EXPIRED)]


def test_a_newer_grant_supersedes_on_whatever_engine(bench: Bench, decode: Decode) -> None:
    other = Decode(bench, "d2").up()
    first_id = decode.grant(1, turn=3)
    second_id = decode.grant(2, turn=4)
    assert decode.releases() == [(1, ReleaseReason.SUPERSEDED)]
    third_id = other.grant(1, turn=1)  # another router counts for itself
    assert decode.releases()[1:] == [(2, ReleaseReason.SUPERSEDED)]
    assert bench.begin(first_id) == Verdict.RELEASED
    assert bench.begin(second_id) == Verdict.RELEASED
    assert bench.lessor.resolve(key(), bench.now).lease_id == third_id
    assert bench.begin(third_id) == Verdict.NONE


def test_a_grant_supersedes_what_an_absent_engine_holds(bench: Bench, decode: Decode) -> None:
    """When that engine comes back it is told to let go."""
    other = Decode(bench, "d2").up()
    decode.grant(1)
    decode.drop_stream()
    other.grant(1)
    decode.up((1, "c"), previous_term=TERM)
    assert decode.releases() == [(1, ReleaseReason.SUPERSEDED)]
    assert bench.lessor.resolve(key(), bench.now).lease_id == other.lease_id(1)


def test_ending_a_conversation_releases_it_at_once(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1)
    assert bench.end_conversation() == 1
    assert decode.releases() == [(1, ReleaseReason.ENDED)]
    assert bench.end_conversation() == 0
    assert bench.begin(lease_id) == Verdict.ENDED
    assert bench.resolve() == Verdict.ENDED
    assert bench.end_conversation("never seen") == 0


def test_the_grant_of_a_turn_that_was_in_flight_when_its_client_ended(
    bench: Bench, decode: Decode
) -> None:
    """It arrives after the end and must not hold memory for the idle time."""
    bench.resolve()
    bench.end_conversation()
    decode.grant(1)
    assert decode.releases() == [(1, ReleaseReason.ENDED)]
    assert bench.resolve() == Verdict.ENDED
    decode.grant(2)  # of the turn that has just begun
    assert bench.resolve() == Verdict.NONE


def test_an_ended_conversation_may_be_taken_up_without_a_router(
    bench: Bench, decode: Decode
) -> None:
    """Nobody announces turns; after the idle time a grant cannot be of a turn before the end."""
    decode.grant(1)
    bench.end_conversation()
    bench.wait(60 * S, decode)
    decode.grant(2)
    assert bench.resolve() == Verdict.NONE


def test_revoking_ends_a_lease(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1)
    bench.lessor.revoke(lease_id, bench.now)
    bench.carry_out()
    assert decode.releases() == [(1, ReleaseReason.REVOKED)]
    assert bench.resolve() == Verdict.RELEASED
    with pytest.raises(LeaseNotFound):
        bench.lessor.revoke(lease_id, bench.now)


def test_an_engine_may_free_at_its_own_bound(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    decode.freed(1, ReleaseReason.EXPIRED)
    assert bench.resolve() == Verdict.EXPIRED


def test_a_withdrawal_tells_the_verdict(bench: Bench, decode: Decode) -> None:
    reasons = {
        "pressure": (ReleaseReason.PRESSURE, Verdict.RELEASED),
        "expired": (ReleaseReason.EXPIRED, Verdict.EXPIRED),
        "superseded": (ReleaseReason.SUPERSEDED, Verdict.RELEASED),
    }
    for number, (name, (reason, verdict)) in enumerate(reasons.items()):
        decode.grant(number, name)
        decode.beat((number, reason))
        assert bench.resolve(name) == verdict


# ---- what is remembered of conversations -----------------------------------------------------


def test_the_first_turn_is_told_from_later_ones(bench: Bench, decode: Decode) -> None:
    assert bench.resolve() == Verdict.FIRST_TURN
    assert bench.resolve() == Verdict.NO_LEASE


def test_the_report_of_a_first_turn_does_not_make_it_a_later_one(bench: Bench) -> None:
    """The router's touch may overtake its question."""
    bench.touch(1)
    assert bench.resolve() == Verdict.FIRST_TURN


def test_a_resolution_names_the_holder(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1, tokens=640)
    held = bench.lessor.resolve(key(), bench.now)
    assert held.lease_id == lease_id
    assert (held.engine_id, held.http_address, held.token_count) == ("d1", "http://d1", 640)
    bench.begin(lease_id)
    bench.end_read(lease_id)
    last = bench.lessor.resolve(key(), bench.now)
    assert (last.lease_id, last.verdict) == (None, Verdict.CONSUMED)
    assert (last.engine_id, last.http_address, last.token_count) == ("d1", "http://d1", 0)


def test_tenants_and_models_are_told_apart(bench: Bench, decode: Decode) -> None:
    decode.grant(1)
    for foreign in (ConversationKey("", "model", "c"), ConversationKey("tenant", "", "c")):
        assert bench.lessor.resolve(foreign, bench.now).verdict == Verdict.FIRST_TURN
    assert bench.resolve() == Verdict.NONE


def test_only_so_many_conversations_without_a_lease_are_remembered() -> None:
    """The longest unused go; one that is held stays whatever happens."""
    bench = Bench(LessorConfig(session_ttl_ns=TTL, longest_read_ns=R, conversations_max=3))
    decode = Decode(bench).up()
    decode.grant(1, "held")
    for name in ("a", "b", "c"):
        bench.resolve(name)
    bench.resolve("a")
    for name in ("d", "e"):
        bench.resolve(name)
    assert bench.resolve("a") == Verdict.NO_LEASE
    assert bench.resolve("b") == Verdict.FIRST_TURN
    assert bench.resolve("held") == Verdict.NONE


def test_waiting_for_a_turn_whose_grant_is_on_its_way(bench: Bench, decode: Decode) -> None:
    def waits(turn: int) -> bool:
        return bench.lessor.awaits_turn(key(), turn, bench.now)

    assert not waits(0)
    assert waits(1)
    decode.grant(1, turn=1)
    assert bench.announced == [key()]
    assert not waits(1)
    assert waits(2)
    decode.grant(2)  # its turn is not known, so there is nothing to compare
    assert not waits(3)
    decode.grant(3, turn=3)
    bench.begin(decode.lease_id(3))
    bench.end_read(decode.lease_id(3))
    assert not waits(3)  # it came and went
    bench.end_conversation()
    assert not waits(4)


# ---- limits ----------------------------------------------------------------------------------


def small(**limits: int) -> Bench:
    return Bench(LessorConfig(session_ttl_ns=TTL, longest_read_ns=R, **limits))


def test_an_engine_holds_so_many_leases() -> None:
    bench = small(leases_per_engine_max=2)
    decode = Decode(bench).up()
    for number in range(3):
        decode.grant(number, f"c{number}")
    assert decode.refusals() == [(2, "LEASES_EXHAUSTED")]
    assert bench.resolve("c2") == Verdict.FIRST_TURN
    bench.end_conversation("c0")
    decode.beat()  # shows that the release has arrived
    decode.grant(3, "c3")
    assert len(decode.refusals()) == 1


def test_all_engines_hold_so_many_leases() -> None:
    """Those of an engine that is away make room first."""
    bench = small(leases_max=2, leases_per_engine_max=2)
    one, two = Decode(bench, "d1").up(), Decode(bench, "d2").up()
    one.grant(1, "a")
    two.grant(1, "b")
    two.grant(2, "c")
    assert two.refusals() == [(2, "LEASES_EXHAUSTED")]
    one.drop_stream()
    two.grant(3, "c")
    assert len(two.refusals()) == 1
    assert bench.resolve("a") == Verdict.ENGINE_LOST


def test_a_retention_holds_so_many_blocks() -> None:
    decode = Decode(small(blocks_per_lease_max=4)).up()
    decode.grant(1, blocks=4)
    decode.grant(2, "other", blocks=5)
    assert decode.refusals() == [(2, "BLOCKS_EXHAUSTED")]


def test_inherited_leases_over_a_limit_wait_and_are_released() -> None:
    """They may be being read, so they are not refused like a grant."""
    bench = small(leases_per_engine_max=1)
    decode = Decode(bench).up((1, "a"), (2, "b"), previous_term=5)
    assert decode.refusals() == []
    bench.wait(INHERIT_BOUND, decode)
    assert decode.releases() == [(2, ReleaseReason.PRESSURE)]
    assert bench.resolve("a") == Verdict.NONE


def test_so_many_engines_have_a_session() -> None:
    bench = small(engines_max=1)
    first = Decode(bench, "d1").up()
    with pytest.raises(EnginesExhausted):
        Decode(bench, "d2").register()
    first.up()  # not one more
    first.drop_stream()
    Decode(bench, "d3").up()


def test_engines_that_are_gone_are_remembered_up_to_a_limit() -> None:
    bench = small(engines_max=2, engines_away_max=2)
    for number in range(5):
        engine = Decode(bench, f"d{number}").up()
        engine.grant(1, f"c{number}")
        engine.drop_stream()
    assert bench.resolve("c0") == Verdict.ENGINE_LOST
    fenced = SessionId("d4", "inc-d4", 1)
    with pytest.raises(SessionFenced):
        bench.lessor.register(
            fenced,
            EngineInfo("", True, b"", b""),
            [],
            quiet_ns=None,
            previous_term=0,
            now_ns=bench.now,
        )


def test_a_prefill_engine_registers_and_retains_nothing(bench: Bench) -> None:
    prefill = Decode(bench, "p1")
    prefill.retains = False
    prefill.up()
    assert [view.engine_id for view in bench.lessor.list_engines(bench.now)] == ["p1"]
    prefill.grant(1)
    assert prefill.refusals() == [(1, "ROLE_CANNOT_RETAIN")]
    with pytest.raises(InvalidArgument, match=r"register\.inventory"):
        prefill.register((1, "c"))


def test_a_lease_id_is_granted_once(bench: Bench, decode: Decode) -> None:
    """Refusing the repeat would free blocks that a reader may be reading."""
    decode.grant(1)
    with pytest.raises(InvalidArgument, match="granted before"):
        decode.grant(1)


def test_a_lease_id_is_not_granted_again_while_its_release_is_on_its_way(
    bench: Bench, decode: Decode
) -> None:
    decode.grant(1)
    bench.end_conversation()
    with pytest.raises(InvalidArgument, match="granted before"):
        decode.grant(1, "other")


def test_a_retention_that_cannot_be_taken_is_refused_alone(bench: Bench, decode: Decode) -> None:
    decode.sequence += 1
    bench.lessor.refuse_grant(
        decode.session_id, decode.sequence, decode.lease_id(1), "RETENTION_INVALID", bench.now
    )
    bench.carry_out()
    assert decode.refusals() == [(1, "RETENTION_INVALID")]
    decode.beat()


def test_each_tick_works_off_a_bounded_number_of_deadlines() -> None:
    """The rest stays due: next_deadline_ns() is in the past."""
    bench = small(expiries_per_tick_max=10)
    decode = Decode(bench).up()
    for number in range(25):
        decode.grant(number, f"c{number}")
    bench.wait(59 * S, decode)
    bench.now += S
    decode.beat()
    released = []
    while (bench.lessor.next_deadline_ns() or bench.now + 1) <= bench.now:
        bench.lessor.expire(bench.now)
        bench.carry_out()
        released.append(len(decode.releases()))
    assert released[-1] == 25
    assert all(
        after - before <= 10 for before, after in zip([0, *released], released, strict=False)
    )


def test_signs_of_life_leave_nothing_behind(bench: Bench, decode: Decode) -> None:
    """A client that toggles its absence a thousand times costs no memory."""
    decode.grant(1)
    for _ in range(1_000):
        bench.lessor.keep_alive(key(), 400 * S, bench.now)
        bench.lessor.keep_alive(key(), 1_000, bench.now)
        bench.lessor.keep_alive(key(), 400 * S, bench.now)
        bench.wait(2_000)
    assert len(bench.lessor._deadlines) < 100
    assert decode.releases() == []


# ---- operators -------------------------------------------------------------------------------


def test_leases_are_listed_page_by_page_in_order_of_id(bench: Bench) -> None:
    """Incarnations whose order differs with and without the dot included."""
    for name, incarnation in (("d1", "a-b"), ("d2", "a"), ("d3", "a0")):
        engine = Decode(bench, name, incarnation).up()
        for number in (1, 2, 10):
            engine.grant(number, f"{name}-{number}")
    listed: list[str] = []
    while True:
        page = bench.lessor.list_leases(
            engine_id="",
            key=None,
            after=listed[-1] if listed else "",
            count_max=2,
            now_ns=bench.now,
        )
        listed += [str(view.lease_id) for view in page]
        if len(page) < 2:
            break
    assert len(listed) == 9
    assert listed == sorted(listed)


def test_leases_are_listed_by_engine_and_conversation(bench: Bench, decode: Decode) -> None:
    other = Decode(bench, "d2").up()
    decode.grant(1, "a")
    decode.grant(2, "b")
    other.grant(1, "c")

    def listed(engine_id: str, name: str | None) -> list[str]:
        views = bench.lessor.list_leases(
            engine_id=engine_id,
            key=None if name is None else key(name),
            after="",
            count_max=10,
            now_ns=bench.now,
        )
        return [str(view.lease_id) for view in views]

    assert listed("d1", None) == ["inc-d1.1.1", "inc-d1.2.1"]
    assert listed("", "c") == ["inc-d2.1.1"]
    assert listed("d1", "c") == []
    assert listed("unknown", None) == []


def test_a_lease_shows_its_state(bench: Bench, decode: Decode) -> None:
    lease_id = decode.grant(1, tokens=64, blocks=4)
    bench.wait(2 * S, decode)
    view = bench.lessor.get_lease(lease_id, bench.now)
    assert (view.state, view.age_ns, view.idle_in_ns) == (LeaseState.ACTIVE, 2 * S, 58 * S)
    assert (view.engine_id, view.token_count, view.block_count) == ("d1", 64, 4)
    bench.touch(1)
    assert bench.lessor.get_lease(lease_id, bench.now).idle_in_ns is None
    bench.begin(lease_id)
    bench.wait(S, decode)
    view = bench.lessor.get_lease(lease_id, bench.now)
    assert (view.state, view.reading_for_ns) == (LeaseState.READING, S)
    bench.end_conversation()
    view = bench.lessor.get_lease(lease_id, bench.now)
    assert (view.state, view.end_reason) == (LeaseState.ENDING, ReleaseReason.ENDED)


def test_an_overdue_read_shows_until_it_is_said_to_be_over(bench: Bench, decode: Decode) -> None:
    """Its blocks are free, but the reader's transfer may still stand still: the router must see."""
    lease_id = decode.grant(1)
    bench.begin(lease_id)
    bench.wait(READER_BOUND, decode)
    assert decode.releases() == [(1, ReleaseReason.READ_FAILED)]
    bench.wait(S, decode)
    view = bench.lessor.get_lease(lease_id, bench.now)
    assert view.lease_id == lease_id
    assert view.state == LeaseState.ENDING
    assert view.reading_for_ns == READER_BOUND + S
    bench.lessor.end_read(lease_id, ReadOutcome.TOO_LONG, bench.now)
    with pytest.raises(LeaseNotFound):
        bench.lessor.get_lease(lease_id, bench.now)


def test_engines_show_their_memory_and_their_leases(bench: Bench, decode: Decode) -> None:
    bench.begin(decode.grant(1, "a"), "a")
    decode.grant(2, "b")
    bench.end_conversation("a")
    bench.wait(S // 2)
    [view] = bench.lessor.list_engines(bench.now)
    assert (view.lease_count, view.heartbeat_age_ns) == (1, S // 2)
    assert view.memory == KvMemory(100, 60, 30)
    bench.now += TTL
    assert bench.lessor.list_engines(bench.now) == []


def test_engines_show_how_often_they_lost_their_session_for_silence(bench: Bench) -> None:
    """A session whose stream broke is not counted: that is no matter of times."""
    decode = Decode(bench, "d1").up()
    [view] = bench.lessor.list_engines(bench.now)
    assert (view.expired_count, view.expiry_age_ns) == (0, None)
    bench.now += TTL
    assert bench.lessor.list_engines(bench.now) == []
    for _ in range(2):
        bench.wait(S)
        decode.up()
        decode.drop_stream()
    bench.wait(S)
    decode.up()
    [view] = bench.lessor.list_engines(bench.now)
    assert (view.expired_count, view.expiry_age_ns) == (1, 3 * S)


# ---- records ---------------------------------------------------------------------------------


async def test_a_new_term_knows_who_is_fenced_and_who_held_what(bench: Bench) -> None:
    """All that the first lessor recorded goes through the store to the second one."""
    Decode(bench, "d1", "frozen").up()
    decode = Decode(bench, "d1", "second").up()
    decode.grant(1, "held")
    bench.end_read(decode.grant(2, "ended"))
    bench.end_conversation("ended")
    store = MemoryStore()
    store.record(bench.records)  # type: ignore[arg-type]

    follower = Bench(term=TERM + 1)
    follower.lessor.restore(await store.load(), follower.now)
    assert follower.resolve("held") == Verdict.ENGINE_LOST
    assert follower.resolve("ended") == Verdict.ENDED
    assert follower.lessor.resolve(key("held"), follower.now).engine_id == "d1"
    with pytest.raises(SessionFenced):
        Decode(follower, "d1", "frozen").register()
    stale = Decode(follower, "d1", "second")
    with pytest.raises(SessionFenced):
        stale.register()
    stale.up((1, "held"), previous_term=TERM)
    follower.wait(INHERIT_BOUND, stale)
    assert follower.resolve("held") == Verdict.NONE


def test_heartbeats_and_reads_record_nothing_about_leases(bench: Bench, decode: Decode) -> None:
    """No write waits on a read, and a heartbeat costs no record of any conversation."""
    lease_id = decode.grant(1)
    bench.records.clear()
    bench.begin(lease_id)
    assert bench.records == []
    decode.beat()
    assert [type(record).__name__ for record in bench.records] == ["SessionKept"]


def test_a_session_is_recorded_with_what_it_fences(bench: Bench) -> None:
    Decode(bench, "d1", "first").up()
    bench.records.clear()
    Decode(bench, "d1", "second").up()
    opened = [record for record in bench.records if isinstance(record, SessionOpened)]
    assert [each.record.fenced for each in opened] == [(), ("first",)]  # once it has echoed


def test_every_refusal_names_its_status_and_reason() -> None:
    """Each error of the core maps to one status, and carries its own reason."""

    def all_of(kind: type[LeaseServiceError]) -> list[type[LeaseServiceError]]:
        below = kind.__subclasses__()
        return below + [deeper for each in below for deeper in all_of(each)]

    kinds = all_of(LeaseServiceError)
    assert len({kind.reason for kind in kinds}) == len(kinds)
    assert all(kind.code.isupper() and kind.reason.isupper() for kind in kinds)
