"""A lessor whose time to lead is limited falls silent in time, and for ever."""

from __future__ import annotations

import pytest
from lessor_bench import CONFIG, TERM, Bench, Decode, S, key

from kvturn_lease.errors import NotLeader
from kvturn_lease.lessor import Lessor
from kvturn_lease.verdict import ReleaseReason, Verdict


class TermBench(Bench):
    """A bench whose lessor leads for 3 s, unless told that it leads on."""

    def __init__(self) -> None:
        super().__init__()
        self.lessor = Lessor(CONFIG, TERM, self.now + 3 * S)


@pytest.fixture
def bench() -> TermBench:
    return TermBench()


@pytest.fixture
def decode(bench: TermBench) -> Decode:
    return Decode(bench).up()


def test_it_says_nothing_once_its_time_to_lead_is_over(bench: TermBench, decode: Decode) -> None:
    """A question that comes at the very end is refused, and so is all after it."""
    lease_id = decode.grant(1)
    bench.now += 3 * S
    heard = len(decode.received)
    with pytest.raises(NotLeader):
        bench.begin(lease_id)
    with pytest.raises(NotLeader):
        decode.beat((1, ReleaseReason.PRESSURE))
    with pytest.raises(NotLeader):
        bench.resolve()
    bench.carry_out()
    assert len(decode.received) == heard
    assert [type(end.error) for end in bench.ended] == [NotLeader]


def test_it_ends_its_sessions_by_itself(bench: TermBench, decode: Decode) -> None:
    """It asks to be woken for that."""
    bench.wait(3 * S)
    assert bench.lessor.deposed
    assert [end.session for end in bench.ended] == [decode.session_id]
    assert bench.lessor.next_deadline_ns() is None


def test_it_leads_on_while_told_so(bench: TermBench, decode: Decode) -> None:
    """An older word that arrives late does not shorten its time."""
    lease_id = decode.grant(1)
    bench.lessor.lead_until(bench.now + 10 * S)
    bench.lessor.lead_until(bench.now + 5 * S)
    bench.wait(9 * S, decode)
    assert bench.begin(lease_id) == Verdict.NONE
    bench.wait(S)
    assert bench.lessor.deposed


def test_a_deposed_lessor_is_not_raised_again(bench: TermBench, decode: Decode) -> None:
    """That it was elected once more would be another term."""
    decode.grant(1)
    bench.lessor.depose()
    bench.lessor.lead_until(bench.now + 100 * S)
    with pytest.raises(NotLeader):
        bench.lessor.touch(key(), 1, bench.now)


def test_the_streams_of_a_deposed_lessor_may_end(bench: TermBench, decode: Decode) -> None:
    """Their ends come after it and change nothing."""
    bench.lessor.depose()
    decode.drop_stream()
    bench.lessor.expire(bench.now)


def test_who_leads_alone_leads_for_ever() -> None:
    bench = Bench()
    assert bench.lessor.next_deadline_ns() is None
    bench.wait(1_000_000 * S)
    assert bench.resolve() == Verdict.FIRST_TURN
