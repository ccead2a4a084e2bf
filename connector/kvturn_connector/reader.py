"""Prefill's side of a D->P read: ask, decide, post once, say how it ended. Sans-IO.

One `Read` per request that came with a lease id:

    ASKED ──answer──> GRANTED ──decide──> planned ──posted──> POSTED ──ended──> ENDED
      │                  │                                      (the worker says how)
      │                  └─ mismatch, below threshold, too late: recompute, EndRead(NOT_READ)
      └─ refused, no answer in time: recompute; a grant that comes later is given back

What binds (ARCHITECTURE.md, "The lease rules"):
- the time for a read counts from when the question was *sent*; after R it is not posted, and what
  a transfer brings later is discarded by the worker;
- one grant is one post: a preempted or rescheduled request never reads again;
- EndRead is sent only when no rank can post any more and every posted transfer has ended, and only
  by the request that holds the grant: it names nothing but the lease, so one sent on the chance
  that a lost answer was a grant would end the read of whoever really has it;
- every way out that is not a completed read is a recompute with a verdict.

Instants are CLOCK_BOOTTIME nanoseconds of this machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.digest import STRIDE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Answer:
    """What BeginRead answered, and what the prompt's tokens have to do with it."""

    granted: bool
    verdict: int
    """Why not, if not granted."""
    retention: common_pb2.Retention
    nixl: common_pb2.NixlAddress
    longest_read_ns: int
    common_tokens: int
    """Longest common prefix of prompt and retention that ends on a digest point."""


@dataclass(frozen=True, slots=True)
class End:
    """An EndRead to send, and what its span needs."""

    request: lease_pb2.EndReadRequest
    traceparent: str = ""
    posted_unix_ns: int = 0
    """When the transfer was posted; 0 if none was."""
    blocks: int = 0
    """Blocks that were to be read."""


class State(enum.Enum):
    """Where a read stands."""

    ASKED = enum.auto()
    GRANTED = enum.auto()
    POSTED = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Read:
    """One request's read."""

    request_id: str
    lease_id: str
    prompt_tokens: int
    asked_ns: int
    traceparent: str = ""
    """W3C trace context of the turn."""
    posted_unix_ns: int = 0
    """Wall clock of the posting, for its span only; 0 before."""
    posted_blocks: int = 0
    """Blocks to be read, for the span only."""
    state: State = State.ASKED
    verdict: int = common_pb2.VERDICT_UNSPECIFIED
    answer: Answer | None = None
    reused_tokens: int = 0
    read_ns: int = 0
    read_bytes: int = 0
    abandoned: bool = False
    """The request is gone; only the transfer is still waited for."""

    @property
    def time_is_up_ns(self) -> int:
        """When the read stops counting. Only once granted."""
        assert self.answer is not None
        return self.asked_ns + self.answer.longest_read_ns


@dataclass(slots=True)
class Reader:
    """All reads of one prefill engine."""

    question_deadline_ns: int
    """How long an answer is waited for."""
    threshold_tokens: int
    """Fewer readable tokens than this are computed."""
    block_size: int
    """Tokens per block of this engine."""
    _reads: dict[str, Read] = field(default_factory=dict)
    _ends: list[End] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._reads)

    def get(self, request_id: str) -> Read | None:
        """The read of a request, until `forget`."""
        return self._reads.get(request_id)

    def ask(
        self, request_id: str, lease_id: str, prompt_tokens: int, traceparent: str, now_ns: int
    ) -> None:
        """Notes that BeginRead is about to be sent. `now_ns` is stamped before sending."""
        self._reads[request_id] = Read(request_id, lease_id, prompt_tokens, now_ns, traceparent)

    def answered(self, request_id: str, lease_id: str, asked_ns: int, answer: Answer) -> None:
        """Takes the answer to the BeginRead of `asked_ns`.

        One that nobody waits for any more is given back, also if its request id, and even its
        lease, has come again: the time for a read counts from the question that was granted.
        """
        read = self._waiting(request_id, asked_ns)
        if read is None or read.lease_id != lease_id:
            if answer.granted:
                self._ends.append(_not_read(lease_id))
            return
        if answer.granted:
            read.answer = answer
            read.state = State.GRANTED
        else:
            self._end(read, answer.verdict)

    def unanswered(self, request_id: str, asked_ns: int, verdict: int) -> None:
        """That BeginRead failed. If the lease was granted all the same, its read ends by itself."""
        read = self._waiting(request_id, asked_ns)
        if read is not None:
            self._end(read, verdict)

    def decide(self, request_id: str, local_tokens: int, now_ns: int) -> Read | None:
        """Decides whether to read. Called on every scheduling pass until the read is posted.

        Args:
            local_tokens: tokens that prefill's own prefix cache holds.

        Returns:
            None while the answer is waited for; else the read, in state GRANTED with
            `answer.common_tokens - local_tokens` tokens to read, or ENDED with the verdict.
        """
        read = self._reads[request_id]
        if read.state is State.ASKED:
            if now_ns < read.asked_ns + self.question_deadline_ns:
                return None
            self._end(read, common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE)
        elif read.state is State.GRANTED:
            refusal = self._refusal(read, local_tokens, now_ns)
            if refusal is None:
                read.verdict = self._verdict(read)
            else:
                self._ends.append(_not_read(read.lease_id))
                self._end(read, refusal)
        return read

    def decline(self, request_id: str, verdict: int) -> None:
        """The scheduler found nothing left to read after all."""
        read = self._reads[request_id]
        assert read.state is State.GRANTED
        self._ends.append(_not_read(read.lease_id))
        self._end(read, verdict)

    def posted(self, request_id: str, tokens: int, unix_ns: int) -> None:
        """The transfer was handed to the workers; `tokens` are to be read."""
        read = self._reads[request_id]
        assert read.state is State.GRANTED
        read.state = State.POSTED
        read.posted_unix_ns = unix_ns
        read.posted_blocks = -(-tokens // self.block_size)
        read.reused_tokens = tokens

    def ended(
        self, request_id: str, outcome: lease_pb2.ReadOutcome, read_ns: int, read_bytes: int
    ) -> None:
        """All ranks have ended their part of the transfer; `outcome` is the worst of them."""
        read = self._reads.get(request_id)
        if read is None or read.state is not State.POSTED:
            return
        read.read_ns = read_ns
        read.read_bytes = read_bytes
        if outcome == lease_pb2.READ_OUTCOME_TOO_LONG:
            read.verdict = common_pb2.VERDICT_READ_TOO_LONG
        elif outcome != lease_pb2.READ_OUTCOME_COMPLETED:
            read.verdict = common_pb2.VERDICT_READ_FAILED
        if outcome != lease_pb2.READ_OUTCOME_COMPLETED or read.abandoned:
            read.reused_tokens = 0
        read.state = State.ENDED
        if read.abandoned:
            del self._reads[request_id]
        end = lease_pb2.EndReadRequest(
            lease_id=read.lease_id,
            outcome=outcome,
            reused_tokens=read.reused_tokens,
            read_bytes=read_bytes,
        )
        end.read_time.FromNanoseconds(read_ns)
        self._ends.append(End(end, read.traceparent, read.posted_unix_ns, read.posted_blocks))

    def gone(self, request_id: str) -> None:
        """The request finished or was aborted.

        A posted transfer goes on: its blocks stay reserved, and EndRead waits for it.
        """
        read = self._reads.get(request_id)
        if read is None:
            return
        if read.state is State.POSTED:
            read.abandoned = True
            return
        if read.state is State.GRANTED:
            self._ends.append(_not_read(read.lease_id))
        del self._reads[request_id]

    def take_ends(self) -> Iterator[End]:
        """Hands out, once, the EndReads to send."""
        ends, self._ends = self._ends, []
        return iter(ends)

    def _waiting(self, request_id: str, asked_ns: int) -> Read | None:
        read = self._reads.get(request_id)
        if read is None or read.state is not State.ASKED or read.asked_ns != asked_ns:
            return None
        return read

    def _refusal(self, read: Read, local_tokens: int, now_ns: int) -> int | None:
        answer = read.answer
        assert answer is not None
        if now_ns >= read.time_is_up_ns:
            return common_pb2.VERDICT_READ_TOO_LONG
        if answer.retention.block_size != self.block_size:
            # vLLM pairs the last blocks of both sides, which are not the same tokens' then.
            return common_pb2.VERDICT_UNSUPPORTED_MODEL
        if answer.common_tokens == 0:
            return common_pb2.VERDICT_PREFIX_MISMATCH
        if answer.retention.whole_only and answer.common_tokens < answer.retention.token_count:
            return common_pb2.VERDICT_UNSUPPORTED_MODEL
        if answer.common_tokens - local_tokens < max(1, self.threshold_tokens):
            return common_pb2.VERDICT_BELOW_THRESHOLD
        return None

    def _verdict(self, read: Read) -> int:
        answer = read.answer
        assert answer is not None
        # The last digest point that could have matched.
        last = answer.retention.token_count
        if read.prompt_tokens < last:
            last = read.prompt_tokens - read.prompt_tokens % STRIDE_TOKENS
        whole = answer.common_tokens == last
        return common_pb2.VERDICT_REUSED if whole else common_pb2.VERDICT_PARTIAL_PREFIX

    def _end(self, read: Read, verdict: int) -> None:
        read.verdict = verdict
        read.answer = None
        read.state = State.ENDED


def _not_read(lease_id: str) -> End:
    return End(lease_pb2.EndReadRequest(lease_id=lease_id, outcome=lease_pb2.READ_OUTCOME_NOT_READ))
