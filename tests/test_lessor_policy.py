"""What keeps a retention and what ends it: policies, what clients say, outlooks, limits."""

from __future__ import annotations

import pytest
from lessor_bench import TTL, Bench, Decode, R, S, key

from kvturn_lease.config import ConfigError, LessorConfig, Policy, parse_config
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import HeartbeatAck
from kvturn_lease.lease import Outlook, Retention
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict


def ruled_by(policy: Policy, **more: int) -> Bench:
    return Bench(
        LessorConfig(
            session_ttl_ns=TTL, longest_read_ns=R, policy=policy, **{"idle_ns": 60 * S} | more
        )
    )


def acks(decode: Decode) -> list[HeartbeatAck]:
    messages = [effect.message for effect in decode.received]
    return [message for message in messages if isinstance(message, HeartbeatAck)]


def outlook_of(decode: Decode, number: int) -> Outlook:
    """Returns what the engine has been told in this session, as it stands after a heartbeat."""
    decode.beat()
    told = {named: outlook for ack in acks(decode) for named, outlook in ack.outlooks}
    return told.get(decode.lease_id(number), Outlook.NORMAL)


# ---- what clients say ------------------------------------------------------------------------


def test_a_client_that_heartbeats_keeps_its_kv_and_no_longer() -> None:
    """It says every 5 s that it is there for 10 s more, for longer than the idle time; then it
    stops, and its KV is freed 10 s after its last word."""
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    for _ in range(30):
        bench.wait(5 * S, decode)
        bench.lessor.keep_alive(key(), 10 * S, bench.now)
    bench.wait(10 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_the_turns_of_a_client_that_heartbeats_count_for_as_long_as_its_heartbeats() -> None:
    """It is gone right after a turn, before its next heartbeat: the idle time is not waited for."""
    bench = Bench()
    decode = Decode(bench).up()
    bench.touch(1)
    bench.lessor.keep_alive(key(), 10 * S, bench.now)
    bench.wait(40 * S, decode)
    decode.grant(1)
    bench.touch(-1)
    bench.wait(10 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]


def test_a_client_that_stopped_its_heartbeats_has_the_idle_time_again() -> None:
    """Once idle, what it said before counts no more."""
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    bench.lessor.keep_alive(key(), 10 * S, bench.now)
    bench.wait(10 * S, decode)
    bench.touch(1)
    decode.grant(2)
    bench.touch(-1)
    bench.wait(59 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.IDLE)]
    bench.wait(S, decode)
    assert decode.releases()[-1] == (2, ReleaseReason.IDLE)


# ---- policies --------------------------------------------------------------------------------


def test_under_pressure_policy_silence_alone_says_nothing() -> None:
    """Most who come back do so after the idle time; engines learn when."""
    bench = ruled_by(Policy.PRESSURE)
    decode = Decode(bench).up()
    decode.grant(1)
    bench.wait(400 * S, decode)
    assert outlook_of(decode, 1) == Outlook.NORMAL
    assert decode.releases() == []


def test_under_pressure_policy_those_who_are_not_back_are_kept_and_marked() -> None:
    """Its client said that it would be back within a minute; it comes later all the same."""
    bench = ruled_by(Policy.PRESSURE)
    decode = Decode(bench).up()
    lease_id = decode.grant(1)
    bench.lessor.keep_alive(key(), 60 * S, bench.now)
    bench.wait(60 * S - 1, decode)
    assert outlook_of(decode, 1) == Outlook.EXPECTED
    bench.wait(1, decode)
    assert outlook_of(decode, 1) == Outlook.IDLE
    bench.wait(100 * S, decode)
    assert decode.releases() == []
    assert bench.resolve() == Verdict.NONE
    assert outlook_of(decode, 1) == Outlook.NORMAL
    assert bench.begin(lease_id) == Verdict.NONE


def test_under_pressure_policy_the_longest_hold_counts() -> None:
    bench = ruled_by(Policy.PRESSURE, max_hold_ns=100 * S)
    decode = Decode(bench).up()
    decode.grant(1)
    bench.wait(100 * S, decode)
    assert decode.releases() == [(1, ReleaseReason.EXPIRED)]


def test_a_fixed_ttl_asks_nobody() -> None:
    """Neither silence nor signs of life change when it ends."""
    bench = ruled_by(Policy.FIXED_TTL, fixed_ttl_ns=200 * S)
    decode = Decode(bench).up()
    decode.grant(1, "silent")
    decode.grant(2, "kept")
    bench.lessor.keep_alive(key("kept"), 400 * S, bench.now)
    bench.wait(200 * S - 1, decode)
    assert decode.releases() == []
    bench.wait(1, decode)
    assert decode.releases() == [(1, ReleaseReason.EXPIRED), (2, ReleaseReason.EXPIRED)]


def test_a_fixed_ttl_under_another_policy_is_refused() -> None:
    """It would be a time that silently does not hold."""
    with pytest.raises(ConfigError, match=r"--fixed-ttl .* does nothing under --policy pressure"):
        parse_config(["--policy=pressure", "--fixed-ttl=5"], {})
    flags = ["--policy=fixed-ttl", "--fixed-ttl=5"]
    assert parse_config(flags, {}).lessor.fixed_ttl_ns == 5 * S


def test_a_fixed_ttl_beyond_the_longest_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="fixed-ttl"):
        LessorConfig(policy=Policy.FIXED_TTL, fixed_ttl_ns=481 * S)


# ---- outlooks --------------------------------------------------------------------------------


def test_a_turn_in_flight_is_expected_back() -> None:
    """The engine gives it up last: a read of it is about to come."""
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    bench.touch(1)
    assert outlook_of(decode, 1) == Outlook.EXPECTED
    bench.touch(-1)
    assert outlook_of(decode, 1) == Outlook.NORMAL


def test_a_client_that_said_it_will_be_back_is_expected() -> None:
    bench = ruled_by(Policy.PRESSURE)
    decode = Decode(bench).up()
    decode.grant(1)
    bench.lessor.keep_alive(key(), 100 * S, bench.now)
    assert outlook_of(decode, 1) == Outlook.EXPECTED
    bench.wait(100 * S, decode)
    assert outlook_of(decode, 1) == Outlook.IDLE


def test_an_outlook_is_told_once() -> None:
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    bench.touch(1)
    decode.beat()
    decode.beat()
    assert [len(ack.outlooks) for ack in acks(decode)[-2:]] == [1, 0]


def test_a_new_session_is_told_anew() -> None:
    """An engine that registers again knows nothing of what its last session was told."""
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    bench.touch(1)
    decode.beat()
    decode.up((1, "c"), previous_term=bench.lessor.term)
    told = [each for ack in acks(decode) for each in ack.outlooks]
    assert told == [(decode.lease_id(1), Outlook.EXPECTED)]


def test_nothing_is_told_of_a_lease_that_ended() -> None:
    bench = Bench()
    decode = Decode(bench).up()
    decode.grant(1)
    bench.touch(1)
    bench.end_conversation()
    decode.beat()
    assert acks(decode)[-1].outlooks == ()


# ---- what is still read ----------------------------------------------------------------------


def test_an_engine_is_told_which_withdrawn_leases_are_still_read() -> None:
    """It gives up two; one has a reader. The other is released before the answer, and once the
    reader has ended nothing is named any more."""
    bench = Bench()
    decode = Decode(bench).up()
    read, unread = decode.grant(1, "a"), decode.grant(2, "b")
    bench.begin(read, "a")
    pressure = [(1, ReleaseReason.PRESSURE), (2, ReleaseReason.PRESSURE)]
    decode.beat(*pressure)
    assert decode.releases() == [(unread.number, ReleaseReason.PRESSURE)]
    assert acks(decode)[-1].reading == (read,)
    bench.end_read(read, ReadOutcome.NOT_READ)
    decode.beat((1, ReleaseReason.PRESSURE))
    assert acks(decode)[-1].reading == ()


def test_a_withdrawn_lease_that_was_inherited_counts_as_read() -> None:
    """A reader of the term before may remain."""
    bench = Bench()
    decode = Decode(bench).up((1, "c"), previous_term=bench.lessor.term - 1)
    decode.beat((1, ReleaseReason.PRESSURE))
    assert acks(decode)[-1].reading == (decode.lease_id(1),)


# ---- limits ----------------------------------------------------------------------------------


def limited(**limits: int) -> Bench:
    return Bench(LessorConfig(session_ttl_ns=TTL, longest_read_ns=R, **limits))


def test_a_lease_holds_so_many_tokens() -> None:
    decode = Decode(limited(tokens_per_lease_max=64)).up()
    decode.grant(1, tokens=64)
    decode.grant(2, "other", tokens=65)
    assert decode.refusals() == [(2, "TOKENS_EXHAUSTED")]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"blocks_per_engine_max": 8}, "BLOCKS_EXHAUSTED"),
        ({"tokens_per_engine_max": 130}, "TOKENS_EXHAUSTED"),
    ],
)
def test_an_engine_holds_so_much(limits: dict[str, int], reason: str) -> None:
    """Each retention has 4 blocks and 64 tokens; what was released makes room."""
    bench = limited(**limits)
    decode = Decode(bench).up()
    for number in (1, 2, 3):
        decode.grant(number, f"c{number}")
    assert decode.refusals() == [(3, reason)]
    bench.end_conversation("c1")
    decode.grant(4, "c4")
    assert len(decode.refusals()) == 1


@pytest.mark.parametrize(
    "limits",
    [{"leases_per_tenant_max": 2}, {"blocks_per_tenant_max": 8}, {"tokens_per_tenant_max": 130}],
)
def test_a_tenant_holds_so_much_over_all_engines(limits: dict[str, int]) -> None:
    """Its next turn supersedes and so needs no room; another tenant has its own."""
    bench = limited(**limits)
    one, two = Decode(bench, "d1").up(), Decode(bench, "d2").up()
    one.grant(1, "a")
    two.grant(1, "b")
    two.grant(2, "c")
    assert two.refusals() == [(2, "TENANT_EXHAUSTED")]
    two.grant(3, "a")
    assert len(two.refusals()) == 1
    assert bench.resolve("a") == Verdict.NONE
    grant_for(two, 4, ConversationKey("another", "model", "c"))
    assert len(two.refusals()) == 1


def grant_for(decode: Decode, number: int, conversation: ConversationKey) -> None:
    decode.sequence += 1
    retention = Retention(decode.lease_id(number), conversation, 64, 4, 0, b"payload")
    decode.bench.lessor.grant(decode.session_id, decode.sequence, retention, decode.bench.now)
    decode.bench.carry_out()


def test_a_lease_that_ended_no_longer_counts_for_its_tenant() -> None:
    """Also while a reader keeps its blocks on the engine."""
    bench = limited(leases_per_tenant_max=1)
    decode = Decode(bench).up()
    bench.begin(decode.grant(1, "a"), "a")
    bench.end_conversation("a")
    decode.grant(2, "b")
    assert decode.refusals() == []
