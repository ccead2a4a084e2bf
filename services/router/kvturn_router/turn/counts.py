"""What turns came to since the process began: plain numbers, read when somebody asks. No I/O.

A turn is counted once, when all is known of it. docs/metrics.md says what each number means.
"""

from enum import StrEnum
from typing import Final

from kvturn.metrics import Family, Histogram, PageWriter
from kvturn_router.turn.account import Account

_SHORT_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_READ_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_BYTES: Final = tuple(float(1 << power) for power in range(16, 37, 2))
_NS: Final = 1e9
_MS: Final = 1e3
_NO_PLAN: Final = "none"
"""Of a turn that ended before it was planned."""

TURNS: Final = Family(
    "kvturn_router_turns_total",
    "counter",
    "Turns that are over, by the way that was planned, the verdict and the outcome.",
    ("plan", "verdict", "outcome"),
)
PROMPT_TOKENS: Final = Family(
    "kvturn_router_prompt_tokens_total",
    "counter",
    "Prompt tokens of served turns, by where their KV came from: reused (read from decode), "
    "local (the engine's own cache) or computed.",
    ("source",),
)
OUTPUT_TOKENS: Final = Family(
    "kvturn_router_output_tokens_total",
    "counter",
    "Tokens that decode generated, as far as its answers tell.",
)
FIRST_BYTE: Final = Family(
    "kvturn_router_first_byte_seconds",
    "histogram",
    "Time from the beginning of a streamed turn to the first byte of decode's answer (TTFT).",
    ("plan",),
    _SECONDS,
)
WHOLE: Final = Family(
    "kvturn_router_turn_seconds",
    "histogram",
    "Time from the beginning of a served turn to its end.",
    ("plan",),
    _SECONDS,
)
PREFILL: Final = Family(
    "kvturn_router_prefill_seconds",
    "histogram",
    "Time of the prefill leg of a served turn, its last attempt.",
    ("plan",),
    _SECONDS,
)
OVERHEAD: Final = Family(
    "kvturn_router_overhead_seconds",
    "histogram",
    "Time from the arrival of a served turn's request until its decode leg is sent, less the waits "
    "for the lease service, for room and for prefill; only of turns with one attempt per leg.",
    (),
    _SHORT_S,
)
QUESTION: Final = Family(
    "kvturn_router_question_seconds",
    "histogram",
    "Time that a turn waited for the lease service's answer.",
    (),
    _SHORT_S,
)
READ: Final = Family(
    "kvturn_router_read_seconds",
    "histogram",
    "Time of a KV read from decode to prefill, as prefill reports it.",
    (),
    _READ_S,
)
READ_BYTES: Final = Family(
    "kvturn_router_read_bytes",
    "histogram",
    "Bytes of a KV read from decode to prefill, as prefill reports them.",
    (),
    _BYTES,
)
SAVED: Final = Family(
    "kvturn_router_saved_seconds_total",
    "counter",
    "Time to the first byte that reuse saved served turns, as the cost model estimates it; turns "
    "that reuse made slower count as nothing saved.",
)
RETRIES: Final = Family(
    "kvturn_router_retries_total",
    "counter",
    "Legs that were sent again, to the same or another engine, because an attempt failed.",
    ("leg",),
)

FAMILIES: Final = (
    TURNS,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    FIRST_BYTE,
    WHOLE,
    PREFILL,
    OVERHEAD,
    QUESTION,
    READ,
    READ_BYTES,
    SAVED,
    RETRIES,
)


class Outcome(StrEnum):
    """How a turn ended, for its client."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """Refused with a status below 500, by the router or by an engine."""
    ENGINE_ERROR = "engine_error"
    """An engine failed, or none was usable."""
    HUNG_UP = "hung_up"
    """The client went before the end."""
    SHUT_DOWN = "shut_down"
    """The router ended it because it ends itself."""
    ROUTER_ERROR = "router_error"
    """A fault of the router."""


class TurnCounts:
    """Counts turns."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, str, str], int] = {}
        """By plan, verdict and outcome."""
        self.reused_tokens = self.local_tokens = self.computed_tokens = self.output_tokens = 0
        self.first_byte: dict[str, Histogram] = {}
        self.whole: dict[str, Histogram] = {}
        self.prefill: dict[str, Histogram] = {}
        """By plan."""
        self.overhead = OVERHEAD.histogram()
        self.question = QUESTION.histogram()
        self.read = READ.histogram()
        self.read_bytes = READ_BYTES.histogram()
        self.saved_s = 0.0
        self.prefill_retries = self.decode_retries = 0

    def over(self, account: Account, outcome: Outcome, *, streamed: bool) -> None:
        """Counts a turn that is over. Tokens and times of a turn count only if it was served."""
        plan = _NO_PLAN if account.kind is None else account.kind._value_
        # `value` is a call, and three of them a tenth of all that is done here.
        key = (plan, account.verdict._value_, outcome._value_)
        self.turns[key] = self.turns.get(key, 0) + 1
        if account.question_ns:
            self.question.observe(account.question_ns / _NS)
        retried = account.prefill_attempts > 1 or account.decode_attempts > 1
        if retried:
            self.prefill_retries += max(account.prefill_attempts - 1, 0)
            self.decode_retries += max(account.decode_attempts - 1, 0)
        if outcome is not Outcome.OK:
            return
        self._count_tokens(account)
        began_ns = account.began_ns
        _of(self.whole, WHOLE, plan).observe((account.ended_ns - began_ns) / _NS)
        if streamed and account.first_byte_ns:
            _of(self.first_byte, FIRST_BYTE, plan).observe((account.first_byte_ns - began_ns) / _NS)
        if account.prefill_attempts:
            _of(self.prefill, PREFILL, plan).observe(account.prefill_ms / _MS)
        if account.saved_ms is not None:
            self.saved_s += max(account.saved_ms, 0.0) / _MS
        if not retried:
            self.overhead.observe(account.overhead_ns() / _NS)
        report = account.answer.report
        if report is not None and report.read_bytes:
            self.read.observe(report.read_ms / _MS)
            self.read_bytes.observe(report.read_bytes)

    def _count_tokens(self, account: Account) -> None:
        prompt_tokens = account.prompt_tokens()
        report = account.answer.report
        # What engines say is not checked by anybody else: a counter never falls.
        reused = min(report.reused_tokens, prompt_tokens) if report is not None else 0
        local = min(account.local_tokens(), prompt_tokens - reused)
        self.reused_tokens += reused
        self.local_tokens += local
        self.computed_tokens += prompt_tokens - reused - local
        if account.usage is not None:
            self.output_tokens += account.usage.completion_tokens

    def write(self, page: PageWriter) -> None:
        """Writes down what was counted up to now."""
        for labels, count in self.turns.items():
            page.put(TURNS, count, *labels)
        page.put(PROMPT_TOKENS, self.reused_tokens, "reused")
        page.put(PROMPT_TOKENS, self.local_tokens, "local")
        page.put(PROMPT_TOKENS, self.computed_tokens, "computed")
        page.put(OUTPUT_TOKENS, self.output_tokens)
        page.put_all(FIRST_BYTE, self.first_byte)
        page.put_all(WHOLE, self.whole)
        page.put_all(PREFILL, self.prefill)
        page.put(OVERHEAD, self.overhead)
        page.put(QUESTION, self.question)
        page.put(READ, self.read)
        page.put(READ_BYTES, self.read_bytes)
        page.put(SAVED, self.saved_s)
        page.put(RETRIES, self.prefill_retries, "prefill")
        page.put(RETRIES, self.decode_retries, "decode")


def _of(histograms: dict[str, Histogram], family: Family, plan: str) -> Histogram:
    histogram = histograms.get(plan)
    if histogram is None:
        histogram = histograms[plan] = family.histogram()
    return histogram
