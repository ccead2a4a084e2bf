"""What is known of one turn, and what is told of it: to the client, in its span, to the costs.

No I/O, no clock.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from kvturn.span_wire import Attribute, attribute_bytes
from kvturn_router.choice.costs import Forecast, Took
from kvturn_router.choice.plan import PlanKind
from kvturn_router.request.conversation import TurnReport
from kvturn_router.request.intake import COMPLETIONS, TurnRequest
from kvturn_router.turn.leg_spans import TIME_TO_FIRST_CHUNK
from kvturn_router.turn.prefill_answer import NOTHING, PrefillAnswer
from kvturn_router.verdict import Verdict

if TYPE_CHECKING:
    from kvturn_router.leases.session_turns import Retained
    from kvturn_router.turn.usage import Usage

_NS_PER_MS = 1e6

_COMMON_MAX: Final = 4_096
"""Sets of attributes that are kept as written, the least recently used forgotten first."""


class Account(msgspec.Struct):
    """One turn's account, filled in as the turn goes on. Times are CLOCK_BOOTTIME, 0 for never."""

    began_ns: int
    came_ns: int = 0
    """When its request was there whole, 0 if not known."""
    question_ns: int = 0
    """How long it waited for the lease service."""
    queued_ns: int = 0
    """How long it waited for room on engines."""
    number: int = 0
    """Number of the turn in its conversation, 0 if not known."""
    verdict: Verdict = Verdict.NOT_OFFERED
    kind: PlanKind | None = None
    reason: str = ""
    forecast: Forecast | None = None
    lease_id: str = ""
    prefill_url: str = ""
    prefill_ms: float = 0.0
    prefill_attempts: int = 0
    answer: PrefillAnswer = NOTHING
    """What prefill said last."""
    not_computed: int | None = None
    """The most prompt tokens that no engine computed, None without a prefill leg."""
    read_failed: bool = False
    decode_url: str = ""
    decode_attempts: int = 0
    decode_began_ns: int = 0
    first_byte_ns: int = 0
    ended_ns: int = 0
    usage: "Usage | None" = None
    """What decode's answer says of its tokens, None if it does not."""
    trace_id: str = ""
    """The turn's trace, 32 hexadecimal digits; "" if it is not recorded."""
    saved_ms: float | None = None
    """What reuse saved until the first token, as costs say; None if they do not."""
    retained: "Retained | None" = None
    """What decode's grant said, where nothing else tells it."""

    def give_reuse_up(self, verdict: Verdict) -> None:
        """Notes that what was read, or was to be read, is of no use."""
        self.read_failed = True
        self.verdict = verdict

    def lose_handover(self) -> None:
        """Notes that prefill's KV may have been fetched in vain: decode computes the prompt."""
        answer = self.answer
        report = answer.report
        if report is not None:
            report = msgspec.structs.replace(report, reused_tokens=0, local_tokens=0)
        self.answer = PrefillAnswer(None, report, answer.prompt_tokens, None)
        if self.verdict in (Verdict.REUSED, Verdict.PARTIAL_PREFIX):
            self.verdict = Verdict.READ_FAILED

    def note_prefill(self) -> None:
        """Notes that the prefill leg is over: what it did not compute."""
        answer = self.answer
        tokens = answer.cached_tokens or 0
        if answer.report is not None:
            tokens = answer.report.reused_tokens + answer.report.local_tokens
        prompt_tokens = self.prompt_tokens()
        self.not_computed = min(tokens, prompt_tokens) if prompt_tokens else tokens

    def prompt_tokens(self) -> int:
        """Returns the tokens of the prompt, 0 if not known."""
        report = self.answer.report
        told = (report.prompt_tokens if report else 0) or self.answer.prompt_tokens
        if not told and self.usage is not None:
            told = self.usage.prompt_tokens
        if not told and self.retained is not None:
            told = self.retained.prompt_tokens
        return told

    def local_tokens(self) -> int:
        """Returns the prompt tokens found in the own cache of the engine that computed it."""
        if self.answer.report is not None:
            return self.answer.report.local_tokens
        if self.kind is PlanKind.LOCAL:
            if self.usage is not None and self.usage.cached_tokens is not None:
                return self.usage.cached_tokens
            return self.retained.local_cached_tokens if self.retained is not None else 0
        return self.answer.cached_tokens or 0

    def overhead_ns(self) -> int:
        """Returns the time until decode was asked that was neither engines' nor spent waiting.

        Only of a turn with one attempt per leg.
        """
        waits_ns = self.question_ns + self.queued_ns + int(self.prefill_ms * _NS_PER_MS)
        return max(self.decode_began_ns - (self.came_ns or self.began_ns) - waits_ns, 0)

    def report(self) -> TurnReport:
        """Returns how the turn was served, as far as is known by now."""
        read = self.answer.report
        first_byte_ms = total_ms = 0.0
        if self.first_byte_ns:
            first_byte_ms = (self.first_byte_ns - self.began_ns) / _NS_PER_MS
        if self.ended_ns:
            total_ms = (self.ended_ns - self.began_ns) / _NS_PER_MS
        # In the order of the fields: names would take as long again.
        return TurnReport(
            self.number,
            self.verdict,
            self.prompt_tokens(),
            read.reused_tokens if read else 0,
            self.local_tokens(),
            round(self.prefill_ms, 3),
            round(read.read_ms, 3) if read else 0.0,
            read.read_bytes if read else 0,
            self.kind or "",
            round(first_byte_ms, 3),
            self.usage.completion_tokens if self.usage is not None else 0,
            self.prefill_url,
            self.decode_url,
            self.reason,
            round(total_ms, 3),
            None if self.saved_ms is None else round(self.saved_ms, 3),
            self.trace_id,
        )

    def took(self, *, streamed: bool) -> Took:
        """Returns what the turn tells of costs."""
        report = self.answer.report
        decode_ms = 0.0
        if self.first_byte_ns:
            decode_ms = (self.first_byte_ns - self.decode_began_ns) / _NS_PER_MS
        return Took(
            prompt_tokens=self.prompt_tokens(),
            reused_tokens=report.reused_tokens if report else 0,
            cached_tokens=self.local_tokens(),
            prefill_ms=self.prefill_ms,
            decode_ms=decode_ms,
            generated_tokens=(
                0 if streamed or self.usage is None else self.usage.completion_tokens
            ),
            read_failed=self.read_failed,
        )

    def attributes(self, request: TurnRequest, report: TurnReport) -> dict[str, Attribute]:
        """Returns what the turn's span says that other turns' do not."""
        attributes: dict[str, Attribute] = {
            "gen_ai.conversation.id": request.key.conversation_id,
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "kvturn.turn": report.turn,
            "kvturn.plan.reason": report.plan_reason,
            "kvturn.prompt_tokens": report.prompt_tokens,
            "kvturn.reused_tokens": report.reused_tokens,
            "kvturn.local_tokens": report.local_tokens,
            "kvturn.read_ms": report.read_ms,
            "kvturn.read_bytes": report.read_bytes,
            "kvturn.lease_id": self.lease_id,
        }
        if self.saved_ms is not None:
            attributes["kvturn.saved_ms"] = self.saved_ms
        if request.stream and self.first_byte_ns:
            attributes[TIME_TO_FIRST_CHUNK] = report.first_byte_ms / 1000
        if self.usage is not None:
            attributes["gen_ai.usage.output_tokens"] = self.usage.completion_tokens
            if self.usage.cached_tokens is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = self.usage.cached_tokens
        return attributes

    def common_attributes(self, request: TurnRequest, status: int) -> bytes:
        """Returns what else it says, written; `status` is HTTP's, 0 if nothing was answered."""
        return _common_attributes(
            request.path == COMPLETIONS,
            request.key.model,
            request.stream,
            self.kind or "",
            self.verdict,
            self.prefill_url,
            self.decode_url,
            "" if self.usage is None else self.usage.model,
            status,
        )


@lru_cache(_COMMON_MAX)
def _common_attributes(
    completion: bool,
    model: str,
    stream: bool,
    plan: str,
    verdict: str,
    prefill_url: str,
    decode_url: str,
    answered_model: str,
    status: int,
) -> bytes:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "text_completion" if completion else "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": stream,
        "kvturn.plan": plan,
        "kvturn.verdict": verdict,
        "kvturn.prefill.engine": prefill_url,
        "kvturn.decode.engine": decode_url,
    }
    if answered_model:
        attributes["gen_ai.response.model"] = answered_model
    if status:
        attributes["http.response.status_code"] = status
    return attribute_bytes(attributes)
