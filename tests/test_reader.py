"""Prefill's reads: asked once, decided, posted at most once, and always ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.reader import Answer, End, Read, Reader, State

MS = 1_000_000
QUESTION_NS = 50 * MS
READ_NS = 3_000 * MS
THRESHOLD = 64
START_NS = 10**12

REUSED = common_pb2.VERDICT_REUSED
PARTIAL = common_pb2.VERDICT_PARTIAL_PREFIX
NOT_READ = lease_pb2.READ_OUTCOME_NOT_READ
COMPLETED = lease_pb2.READ_OUTCOME_COMPLETED
FAILED = lease_pb2.READ_OUTCOME_FAILED
TOO_LONG = lease_pb2.READ_OUTCOME_TOO_LONG
BLOCK_SIZE = 128


def make() -> Reader:
    return Reader(QUESTION_NS, THRESHOLD, BLOCK_SIZE)


def ask(reader: Reader, prompt_tokens: int = 400, request_id: str = "r", lease: str = "l") -> None:
    reader.ask(request_id, lease, prompt_tokens, "traceparent", START_NS)


def grant(common_tokens: int = 300, token_count: int = 300, *, whole_only: bool = False) -> Answer:
    return Answer(
        granted=True,
        verdict=common_pb2.VERDICT_UNSPECIFIED,
        retention=common_pb2.Retention(
            token_count=token_count, whole_only=whole_only, block_size=BLOCK_SIZE
        ),
        nixl=common_pb2.NixlAddress(),
        longest_read_ns=READ_NS,
        common_tokens=common_tokens,
    )


def refusal(verdict: int) -> Answer:
    return Answer(
        granted=False,
        verdict=verdict,
        retention=common_pb2.Retention(),
        nixl=common_pb2.NixlAddress(),
        longest_read_ns=0,
        common_tokens=0,
    )


def decided(reader: Reader, local_tokens: int = 0, now_ns: int = START_NS + MS) -> Read:
    read = reader.decide("r", local_tokens, now_ns)
    assert read is not None
    return read


def ends(reader: Reader) -> list[tuple[str, int]]:
    return [(end.request.lease_id, end.request.outcome) for end in reader.take_ends()]


def gone(reader: Reader) -> None:
    """The request finishes: whatever the path was, nothing of it may be left."""
    reader.gone("r")
    assert len(reader) == 0
    assert reader.get("r") is None
    assert ends(reader) == []


# --- the path of a read that works ---------------------------------------------------------------


def test_granted_read_is_posted_and_ended() -> None:
    """Asked, granted, read whole, used."""
    reader = make()
    ask(reader)
    assert reader.decide("r", 0, START_NS + MS) is None
    reader.answered("r", "l", START_NS, grant())
    read = decided(reader)
    assert read.state is State.GRANTED
    assert read.answer is not None
    assert read.answer.common_tokens == 300
    assert read.time_is_up_ns == START_NS + READ_NS
    reader.posted("r", 300, unix_ns=77)
    assert ends(reader) == []
    reader.ended("r", COMPLETED, read_ns=5 * MS, read_bytes=1000)
    assert (read.state, read.verdict, read.reused_tokens) == (State.ENDED, REUSED, 300)
    assert (read.read_ns, read.read_bytes) == (5 * MS, 1000)
    (end,) = reader.take_ends()
    assert end == End(
        lease_pb2.EndReadRequest(
            lease_id="l",
            outcome=COMPLETED,
            reused_tokens=300,
            read_bytes=1000,
            read_time=end.request.read_time,
        ),
        "traceparent",
        77,
        3,
    )
    assert end.request.read_time.ToNanoseconds() == 5 * MS
    assert reader.decide("r", 0, START_NS + 2 * MS) is read
    gone(reader)


def test_decision_can_be_asked_for_again_until_it_is_posted() -> None:
    """No free blocks this step: the scheduler asks again, with another local hit perhaps."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    for local_tokens in (0, 128, 0):
        assert decided(reader, local_tokens).state is State.GRANTED
    assert ends(reader) == []


def test_local_hit_shortens_the_read() -> None:
    """Only what prefill does not hold itself is read; the rest counts as local."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    assert decided(reader, local_tokens=128).state is State.GRANTED
    reader.posted("r", 172, unix_ns=1)
    reader.ended("r", COMPLETED, 1, 1)
    read = reader.get("r")
    assert read is not None
    assert read.reused_tokens == 172


# --- the ways out --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdict",
    [
        common_pb2.VERDICT_CONSUMED,
        common_pb2.VERDICT_READ_IN_PROGRESS,
        common_pb2.VERDICT_ENGINE_LOST,
    ],
)
def test_refusal_is_the_verdict_and_ends_nothing(verdict: int) -> None:
    """An EndRead here would end the read of the request that has the lease."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, refusal(verdict))
    read = decided(reader)
    assert (read.state, read.verdict, read.reused_tokens) == (State.ENDED, verdict, 0)
    assert ends(reader) == []
    gone(reader)


def test_no_answer_by_the_deadline_recomputes() -> None:
    """At the deadline, not a nanosecond before."""
    reader = make()
    ask(reader)
    assert reader.decide("r", 0, START_NS + QUESTION_NS - 1) is None
    read = decided(reader, now_ns=START_NS + QUESTION_NS)
    assert read.state is State.ENDED
    assert read.verdict == common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
    assert ends(reader) == []
    gone(reader)


def test_unanswered_question_never_ends_another_reader_of_the_lease() -> None:
    """Two turns race for a lease; the one that hears nothing must leave the other's read alone.

    The lease service granted the other one, and EndRead names nothing but the lease.
    """
    reader = make()
    for request_id in ("deadline", "failed", "aborted"):
        ask(reader, request_id=request_id)
    reader.decide("deadline", 0, START_NS + QUESTION_NS)
    reader.unanswered("failed", START_NS, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
    for request_id in ("deadline", "failed", "aborted"):
        reader.gone(request_id)
    assert ends(reader) == []
    assert len(reader) == 0


def test_late_grant_is_given_back() -> None:
    """Granted after the deadline: nobody will read, and the lease service is told."""
    reader = make()
    ask(reader)
    decided(reader, now_ns=START_NS + QUESTION_NS)
    reader.answered("r", "l", START_NS, grant())
    assert ends(reader) == [("l", NOT_READ)]
    assert decided(reader).verdict == common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
    gone(reader)


def test_grant_for_a_request_that_is_gone_is_given_back() -> None:
    """Aborted while the question was under way."""
    reader = make()
    ask(reader)
    gone(reader)
    reader.answered("r", "l", START_NS, grant())
    assert ends(reader) == [("l", NOT_READ)]
    assert len(reader) == 0


def test_refusal_for_a_request_that_is_gone_changes_nothing() -> None:
    """There is nothing to give back."""
    reader = make()
    ask(reader)
    gone(reader)
    reader.answered("r", "l", START_NS, refusal(common_pb2.VERDICT_CONSUMED))
    reader.unanswered("r", START_NS, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
    assert ends(reader) == []


def test_answer_about_another_lease_is_given_back() -> None:
    """A request id came again with another lease; the old answer is not about it."""
    reader = make()
    ask(reader, lease="new")
    reader.answered("r", "old", START_NS, grant())
    assert ends(reader) == [("old", NOT_READ)]
    assert reader.decide("r", 0, START_NS + MS) is None


def test_answer_to_an_earlier_question_is_given_back() -> None:
    """The router sent the same request id and lease again while the first question was out.

    The time for a read counts from the question that was granted, and that was the first one.
    """
    reader = make()
    ask(reader)
    reader.gone("r")
    reader.ask("r", "l", 400, "", START_NS + READ_NS - MS)
    reader.unanswered("r", START_NS, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
    reader.answered("r", "l", START_NS, grant())
    assert ends(reader) == [("l", NOT_READ)]
    assert reader.decide("r", 0, START_NS + READ_NS) is None
    reader.answered("r", "l", START_NS + READ_NS - MS, refusal(common_pb2.VERDICT_CONSUMED))
    assert decided(reader, now_ns=START_NS + READ_NS).verdict == common_pb2.VERDICT_CONSUMED


def test_failed_question_is_the_verdict_given() -> None:
    """The connection was refused: no need to wait for the deadline."""
    reader = make()
    ask(reader)
    reader.unanswered("r", START_NS, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
    read = decided(reader)
    assert read.verdict == common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
    gone(reader)


def test_failure_after_the_answer_changes_nothing() -> None:
    """Answers and failures of one question cannot both count."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    reader.unanswered("r", START_NS, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
    assert decided(reader).state is State.GRANTED


def test_time_that_is_up_before_posting_recomputes() -> None:
    """R counts from when the question was sent, not from its answer."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    assert decided(reader, now_ns=START_NS + READ_NS - 1).state is State.GRANTED
    read = decided(reader, now_ns=START_NS + READ_NS)
    assert (read.state, read.verdict) == (State.ENDED, common_pb2.VERDICT_READ_TOO_LONG)
    assert ends(reader) == [("l", NOT_READ)]
    gone(reader)


@pytest.mark.parametrize(
    ("answer", "local_tokens", "verdict"),
    [
        (grant(common_tokens=0), 0, common_pb2.VERDICT_PREFIX_MISMATCH),
        (grant(common_tokens=63, token_count=63), 0, common_pb2.VERDICT_BELOW_THRESHOLD),
        (grant(common_tokens=300), 237, common_pb2.VERDICT_BELOW_THRESHOLD),
        (grant(common_tokens=300), 300, common_pb2.VERDICT_BELOW_THRESHOLD),
        (grant(common_tokens=300), 384, common_pb2.VERDICT_BELOW_THRESHOLD),
        (grant(common_tokens=288, whole_only=True), 0, common_pb2.VERDICT_UNSUPPORTED_MODEL),
    ],
)
def test_grant_that_is_not_worth_reading_is_given_back(
    answer: Answer, local_tokens: int, verdict: int
) -> None:
    """Mismatch, too few tokens (also because prefill holds them itself), not the whole."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, answer)
    read = decided(reader, local_tokens)
    assert (read.state, read.verdict, read.reused_tokens) == (State.ENDED, verdict, 0)
    assert ends(reader) == [("l", NOT_READ)]
    assert decided(reader, local_tokens) is read
    assert ends(reader) == []
    gone(reader)


@pytest.mark.parametrize(
    ("answer", "local_tokens"),
    [
        (grant(common_tokens=64), 0),
        (grant(common_tokens=300), 236),
        (grant(common_tokens=300, whole_only=True), 0),
    ],
)
def test_grant_at_the_threshold_is_read(answer: Answer, local_tokens: int) -> None:
    """Exactly `threshold_tokens` left to read; or whole, where only whole will do."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, answer)
    assert decided(reader, local_tokens).state is State.GRANTED


def test_threshold_of_zero_still_needs_a_token_to_read() -> None:
    """A read of nothing would be a read that never ends."""
    reader = Reader(QUESTION_NS, threshold_tokens=0, block_size=BLOCK_SIZE)
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    assert decided(reader, local_tokens=299).state is State.GRANTED
    assert decided(reader, local_tokens=300).verdict == common_pb2.VERDICT_BELOW_THRESHOLD


def test_declined_read_is_given_back() -> None:
    """The scheduler found nothing left to read after all."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    decided(reader)
    reader.decline("r", common_pb2.VERDICT_BELOW_THRESHOLD)
    assert ends(reader) == [("l", NOT_READ)]
    assert decided(reader).verdict == common_pb2.VERDICT_BELOW_THRESHOLD
    gone(reader)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (FAILED, common_pb2.VERDICT_READ_FAILED),
        (TOO_LONG, common_pb2.VERDICT_READ_TOO_LONG),
        (NOT_READ, common_pb2.VERDICT_READ_FAILED),
    ],
)
def test_transfer_that_did_not_complete_reuses_nothing(
    outcome: lease_pb2.ReadOutcome, verdict: int
) -> None:
    """The turn recomputes; the lease service learns how the read ended."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    decided(reader)
    reader.posted("r", 300, unix_ns=1)
    reader.ended("r", outcome, 5, 0)
    read = decided(reader)
    assert (read.state, read.verdict, read.reused_tokens) == (State.ENDED, verdict, 0)
    (end,) = reader.take_ends()
    assert (end.request.outcome, end.request.reused_tokens) == (outcome, 0)
    gone(reader)


def test_granted_read_of_a_request_that_goes_away_is_given_back() -> None:
    """Aborted before anything was posted."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    decided(reader)
    reader.gone("r")
    assert ends(reader) == [("l", NOT_READ)]
    assert len(reader) == 0


@pytest.mark.parametrize("outcome", [COMPLETED, FAILED, TOO_LONG])
def test_abort_waits_for_the_posted_transfer(outcome: lease_pb2.ReadOutcome) -> None:
    """Rule 15: the blocks are still being written; EndRead would let decode reuse them.

    What was read is not used any more.
    """
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    decided(reader)
    reader.posted("r", 300, unix_ns=1)
    reader.gone("r")
    assert ends(reader) == []
    assert len(reader) == 1
    reader.ended("r", outcome, 5, 1000)
    (end,) = reader.take_ends()
    assert (end.request.outcome, end.request.reused_tokens) == (outcome, 0)
    assert len(reader) == 0


def test_end_that_is_told_twice_counts_once() -> None:
    """Also for a request that is gone."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant())
    reader.ended("r", COMPLETED, 1, 1)
    assert ends(reader) == []
    reader.posted("r", 300, unix_ns=1)
    reader.ended("r", COMPLETED, 1, 1)
    reader.ended("r", FAILED, 1, 1)
    assert ends(reader) == [("l", COMPLETED)]
    gone(reader)
    reader.ended("r", FAILED, 1, 1)
    reader.gone("r")
    assert ends(reader) == []


def test_ends_are_handed_out_once() -> None:
    """Each becomes one call."""
    reader = make()
    ask(reader)
    reader.answered("r", "l", START_NS, grant(common_tokens=0))
    decided(reader)
    assert ends(reader) == [("l", NOT_READ)]
    assert ends(reader) == []


# --- reused or partial_prefix --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "token_count", "common_tokens", "verdict"),
    [
        (400, 300, 300, REUSED),  # grew
        (400, 300, 288, PARTIAL),  # edited just before the end of the retention
        (300, 300, 300, REUSED),  # regenerated, the reply not retained
        (250, 300, 240, REUSED),  # regenerated: 240 is the last digest point within 250
        (250, 300, 224, PARTIAL),
        (240, 300, 240, REUSED),
        (239, 300, 224, REUSED),
        (299, 300, 288, REUSED),
    ],
)
def test_reused_means_all_that_could_match(
    prompt_tokens: int, token_count: int, common_tokens: int, verdict: int
) -> None:
    """Up to the last digest point that lies within both; less is a partial prefix."""
    reader = make()
    ask(reader, prompt_tokens)
    reader.answered("r", "l", START_NS, grant(common_tokens, token_count))
    assert decided(reader).verdict == verdict


# --- any order of events -------------------------------------------------------------------------


@dataclass
class Seen:
    """What an onlooker knows about one request."""

    asked_ns: int
    lease_id: str
    answered: bool = False
    granted: bool = False
    posted: bool = False
    transfer_ended: bool = False
    gone: bool = False
    ends: list[int] = field(default_factory=list)


class ReaderAgainstModel(RuleBasedStateMachine):
    """Questions, answers, transfers and aborts of several requests, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = make()
        self.now_ns = START_NS
        self.seen: dict[str, Seen] = {}

    def pick(self, data: st.DataObject) -> tuple[str, Seen]:
        request_id = data.draw(st.sampled_from(sorted(self.seen)))
        return request_id, self.seen[request_id]

    def collect(self) -> None:
        for end in self.reader.take_ends():
            (one,) = [each for each in self.seen.values() if each.lease_id == end.request.lease_id]
            one.ends.append(end.request.outcome)

    @rule(ms=st.sampled_from([1, 2, 3, 20, 50, 3_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * MS

    @precondition(lambda self: len(self.seen) < 6)
    @rule()
    def request_arrives(self) -> None:
        request_id = f"r{len(self.seen)}"
        self.seen[request_id] = Seen(self.now_ns, f"lease-{request_id}")
        self.reader.ask(request_id, f"lease-{request_id}", 400, "", self.now_ns)

    @precondition(lambda self: len(self.seen) < 6)
    @rule()
    def request_starts_to_read(self) -> None:
        request_id = f"r{len(self.seen)}"
        self.request_arrives()
        one = self.seen[request_id]
        one.answered = one.granted = one.posted = True
        self.reader.answered(request_id, one.lease_id, one.asked_ns, grant())
        read = self.reader.decide(request_id, 0, self.now_ns)
        assert read is not None
        self.reader.posted(request_id, 300, unix_ns=1)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), common=st.sampled_from([0, 48, 288, 300]), whole_only=st.booleans())
    def grant_arrives(self, data: st.DataObject, common: int, whole_only: bool) -> None:
        request_id, one = self.pick(data)
        if not one.answered:
            one.answered = one.granted = True
            answer = grant(common, whole_only=whole_only)
            self.reader.answered(request_id, one.lease_id, one.asked_ns, answer)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), failed=st.booleans())
    def refusal_arrives(self, data: st.DataObject, failed: bool) -> None:
        request_id, one = self.pick(data)
        if not one.answered:
            one.answered = True
            verdict = common_pb2.VERDICT_CONSUMED
            if failed:
                self.reader.unanswered(request_id, one.asked_ns, verdict)
            else:
                self.reader.answered(request_id, one.lease_id, one.asked_ns, refusal(verdict))

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), local=st.sampled_from([0, 128, 256, 384]), has_blocks=st.booleans())
    def scheduler_looks(self, data: st.DataObject, local: int, has_blocks: bool) -> None:
        request_id, one = self.pick(data)
        if one.gone or (one.posted and not one.transfer_ended):
            return
        read = self.reader.decide(request_id, local, self.now_ns)
        if read is None:
            assert not one.answered
            assert self.now_ns < one.asked_ns + QUESTION_NS
        elif read.state is State.GRANTED:
            assert one.granted
            assert not one.posted
            assert self.now_ns < one.asked_ns + READ_NS
            assert read.answer is not None
            tokens = read.answer.common_tokens - local
            assert tokens >= THRESHOLD
            if has_blocks:
                one.posted = True
                self.reader.posted(request_id, tokens, unix_ns=1)
        else:
            assert read.state is State.ENDED
            assert read.verdict != common_pb2.VERDICT_UNSPECIFIED
            if read.verdict in (REUSED, PARTIAL):
                assert one.transfer_ended
            else:
                assert read.reused_tokens == 0

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def scheduler_declines(self, data: st.DataObject) -> None:
        request_id, _ = self.pick(data)
        read = self.reader.get(request_id)
        if read is not None and read.state is State.GRANTED:
            self.reader.decline(request_id, common_pb2.VERDICT_BELOW_THRESHOLD)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), outcome=st.sampled_from([COMPLETED, FAILED, TOO_LONG]))
    def transfer_ends(self, data: st.DataObject, outcome: lease_pb2.ReadOutcome) -> None:
        request_id, one = self.pick(data)
        if one.posted and not one.transfer_ended:
            self.collect()
            assert one.ends == [], "EndRead while a transfer was under way"
            one.transfer_ended = True
            self.reader.ended(request_id, outcome, 1, 1)
            self.collect()
            assert one.ends == [outcome]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def request_goes(self, data: st.DataObject) -> None:
        request_id, one = self.pick(data)
        if not one.gone:
            one.gone = True
            self.reader.gone(request_id)

    @invariant()
    def no_end_without_a_grant_and_none_before_the_transfer_ended(self) -> None:
        self.collect()
        for one in self.seen.values():
            assert len(one.ends) <= one.granted
            assert not one.ends or not one.posted or one.transfer_ended
            if one.gone and one.granted and (not one.posted or one.transfer_ended):
                assert len(one.ends) == 1, "a granted lease was never given back"

    @invariant()
    def nothing_is_left_of_what_is_over(self) -> None:
        left = [
            one
            for one in self.seen.values()
            if not one.gone or (one.posted and not one.transfer_ended)
        ]
        assert len(self.reader) == len(left)


ReaderAgainstModel.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
test_any_order_of_events_leaks_nothing = ReaderAgainstModel.TestCase


def test_blocks_of_another_size_are_not_read() -> None:
    """vLLM would pair blocks that do not hold the same tokens."""
    reader = make()
    ask(reader)
    answer = grant()
    answer.retention.block_size = BLOCK_SIZE // 8
    reader.answered("r", "l", START_NS, answer)
    assert decided(reader).verdict == common_pb2.VERDICT_UNSUPPORTED_MODEL
    assert [end.request.outcome for end in reader.take_ends()] == [NOT_READ]
