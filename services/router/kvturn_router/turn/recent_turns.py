"""The turns that this router process served last: enough to tell how reuse does. No I/O, no clock.

One is added with each turn, and looked at only when somebody asks.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

from kvturn_router.request.conversation import (
    ConversationEntry,
    ConversationKey,
    TurnReport,
)
from kvturn_router.verdict import Verdict

TURNS_MAX: Final = 1024
"""Turns remembered; the oldest go first."""
SPAN_S: Final = 900
"""How long a turn counts as recent."""

_WITH_REUSE: Final = (Verdict.REUSED, Verdict.PARTIAL_PREFIX, Verdict.LOCAL)


class RecentTurn(NamedTuple):
    """A turn that was served."""

    ended_ns: int
    key: ConversationKey
    report: TurnReport
    streamed: bool


class VerdictCount(NamedTuple):
    """What the recent turns of one verdict come to."""

    verdict: Verdict
    turns: int
    prompt_tokens: int
    computed_tokens: int


class FirstBytes(NamedTuple):
    """The first bytes of streamed answers: of how many turns, and their median time."""

    turns: int
    median_ms: float | None


class RecentTally(NamedTuple):
    """What the recent turns come to. Tokens are of prompts."""

    span_s: int
    turns_max: int
    turns: int
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    verdicts: list[VerdictCount]
    """The most frequent first."""
    with_reuse: FirstBytes
    without_reuse: FirstBytes


class RecentTurns:
    """The latest turns, at most `TURNS_MAX`. Times are CLOCK_BOOTTIME."""

    def __init__(self) -> None:
        self._turns: deque[RecentTurn] = deque(maxlen=TURNS_MAX)

    def ended(
        self, now_ns: int, key: ConversationKey, report: TurnReport, *, streamed: bool
    ) -> None:
        """Takes a turn that has ended. `streamed` says whether its answer came in pieces."""
        self._turns.append(RecentTurn(now_ns, key, report, streamed))

    def tally(self, now_ns: int) -> RecentTally:
        """Returns what the recent turns come to."""
        turns = self._recent(now_ns)
        reports = [turn.report for turn in turns]
        return RecentTally(
            span_s=SPAN_S,
            turns_max=TURNS_MAX,
            turns=len(turns),
            prompt_tokens=sum(report.prompt_tokens for report in reports),
            reused_tokens=sum(report.reused_tokens for report in reports),
            local_tokens=sum(report.local_tokens for report in reports),
            verdicts=_by_verdict(reports),
            with_reuse=_first_bytes(turn for turn in turns if _reuses(turn)),
            without_reuse=_first_bytes(turn for turn in turns if not _reuses(turn)),
        )

    def conversations(
        self, now_ns: int, *, tenant: str | None, model: str | None
    ) -> list[ConversationEntry]:
        """Returns the conversations of all turns that are remembered, the latest first.

        `tenant` and `model` are those wanted, None for any.
        """
        latest: dict[ConversationKey, ConversationEntry] = {}
        for turn in reversed(self._turns):
            key = turn.key
            if key in latest or tenant not in (None, key.tenant) or model not in (None, key.model):
                continue
            quiet_s = (now_ns - turn.ended_ns) / 1e9
            latest[key] = ConversationEntry(
                *key, turns=turn.report.turn, quiet_s=quiet_s, latest_turn=turn.report
            )
        return list(latest.values())

    def _recent(self, now_ns: int) -> list[RecentTurn]:
        since_ns = now_ns - SPAN_S * 10**9
        return [turn for turn in self._turns if turn.ended_ns > since_ns]


def _reuses(turn: RecentTurn) -> bool:
    return turn.report.verdict in _WITH_REUSE


def _first_bytes(turns: Iterable[RecentTurn]) -> FirstBytes:
    # An answer in one piece has its first byte when all is generated, which tells nothing.
    times = [turn.report.first_byte_ms for turn in turns if turn.streamed]
    known = [time_ms for time_ms in times if time_ms]
    return FirstBytes(len(known), median(known) if known else None)


def _by_verdict(reports: Sequence[TurnReport]) -> list[VerdictCount]:
    counts: dict[Verdict, VerdictCount] = {}
    for report in reports:
        before = counts.get(report.verdict) or VerdictCount(report.verdict, 0, 0, 0)
        computed = report.prompt_tokens - report.reused_tokens - report.local_tokens
        counts[report.verdict] = VerdictCount(
            report.verdict,
            before.turns + 1,
            before.prompt_tokens + report.prompt_tokens,
            before.computed_tokens + max(computed, 0),
        )
    return sorted(counts.values(), key=lambda count: -count.turns)
