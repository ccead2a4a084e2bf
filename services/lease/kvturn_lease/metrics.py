"""What a lease service tells at /metrics. docs/metrics.md says what each number means.

What happens is counted in `tally.py`, over all terms of the process; what there is now is looked at
when somebody asks, and is 0 while another process leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvturn.metrics import ENGINES_NAMED_MAX, OTHER, Family, PageWriter
from kvturn.metrics_page import process_families, process_page
from kvturn_lease.tally import RENEWAL, STORE_WRITE
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvturn.metrics import Page
    from kvturn.span_export import SpanQueue
    from kvturn_lease.census import Census, Holding
    from kvturn_lease.servicer import LeaseServicer

_SECOND_NS = 1_000_000_000
_ENDS: Final = ("closed", "expired", "fenced", "deposed")

LEADING: Final = Family(
    "kvturn_lease_leading", "gauge", "1 while this process leads and answers, 0 while it stands by."
)
TERM_AGE: Final = Family(
    "kvturn_lease_term_age_seconds", "gauge", "How long the term has lasted; 0 while standing by."
)
TERMS: Final = Family(
    "kvturn_lease_terms_total", "counter", "Terms that this process has begun to lead."
)
ELECTIONS: Final = Family(
    "kvturn_lease_elections_total",
    "counter",
    "Attempts to be elected: won, lost (another was faster) or failed (etcd gave no answer).",
    ("outcome",),
)
LEASES: Final = Family(
    "kvturn_lease_leases",
    "gauge",
    "Leases by state: active, reading (its read was granted and may go on) or ending (no longer "
    "granted, not yet released).",
    ("state",),
)
GRANTS: Final = Family(
    "kvturn_lease_grants_total", "counter", "Leases granted on retentions of finished turns."
)
INHERITED: Final = Family(
    "kvturn_lease_inherited_total",
    "counter",
    "Retentions that engines brought when they registered and that this term had not granted.",
)
GRANTS_REFUSED: Final = Family(
    "kvturn_lease_grants_refused_total",
    "counter",
    "Retentions that were refused, by reason: the limit that they would break, ROLE_CANNOT_RETAIN "
    "or RETENTION_INVALID.",
    ("reason",),
)
RELEASES: Final = Family(
    "kvturn_lease_releases_total",
    "counter",
    "Leases that ended, by reason, as in common.proto's ReleaseReason.",
    ("reason",),
)
READS_GRANTED: Final = Family(
    "kvturn_lease_reads_granted_total", "counter", "Reads that were granted."
)
READS_REFUSED: Final = Family(
    "kvturn_lease_reads_refused_total",
    "counter",
    "Reads that were refused, by the verdict that says why.",
    ("verdict",),
)
READS_ENDED: Final = Family(
    "kvturn_lease_reads_ended_total",
    "counter",
    "Reads by how they ended: completed, not_read (given back), failed, too_long, or overdue "
    "(their time was up without a word of the reader).",
    ("outcome",),
)
REGISTRATIONS: Final = Family(
    "kvturn_lease_engine_registrations_total", "counter", "Sessions that engines have opened."
)
SESSIONS_ENDED: Final = Family(
    "kvturn_lease_engine_sessions_ended_total",
    "counter",
    "Engines' sessions by how they ended: closed (their stream broke), expired (no heartbeat for "
    "the TTL), fenced (a newer one) or deposed (the term was over).",
    ("reason",),
)
HEARTBEATS: Final = Family("kvturn_lease_heartbeats_total", "counter", "Heartbeats of engines.")
ENGINES: Final = Family(
    "kvturn_lease_engines",
    "gauge",
    "Engines by state: session (a live one), draining (the same, and given no new turns) or away "
    "(without a session, their leases remembered).",
    ("state",),
)
ENGINE_LEASES: Final = Family(
    "kvturn_lease_engine_leases", "gauge", "Leases of an engine that have not ended.", ("engine",)
)
ENGINE_BLOCKS: Final = Family(
    "kvturn_lease_engine_leased_blocks",
    "gauge",
    "Blocks of an engine's KV memory under leases.",
    ("engine",),
)
ENGINE_TOKENS: Final = Family(
    "kvturn_lease_engine_leased_tokens", "gauge", "Tokens of an engine under leases.", ("engine",)
)
ENGINE_MEMORY: Final = Family(
    "kvturn_lease_engine_kv_blocks",
    "gauge",
    "An engine's KV memory by what it is used for, as its latest heartbeat said: active (running "
    "requests), retained or free.",
    ("engine", "use"),
)
ENGINE_AGE: Final = Family(
    "kvturn_lease_engine_heartbeat_age_seconds",
    "gauge",
    "Time since an engine's latest heartbeat.",
    ("engine",),
)
CONVERSATIONS: Final = Family(
    "kvturn_lease_conversations", "gauge", "Conversations that are remembered."
)
ROUTER_SESSIONS: Final = Family("kvturn_lease_router_sessions", "gauge", "Routers with a session.")
TURNS_IN_FLIGHT: Final = Family(
    "kvturn_lease_turns_in_flight", "gauge", "Turns in flight of all routers."
)
CALLS: Final = Family(
    "kvturn_lease_calls_total",
    "counter",
    "Calls of the gRPC API that were answered, by method and by ok or the error's reason; a "
    "session is one call, counted when it ends.",
    ("method", "answer"),
)
SPANS: Final = Family(
    "kvturn_lease_spans_total",
    "counter",
    "Spans by what became of them: sent, or dropped because they did not fit or could not be "
    "delivered.",
    ("outcome",),
)
STORE_WAITING: Final = Family(
    "kvturn_lease_store_waiting_records", "gauge", "Records that etcd does not have yet."
)
STORE_DROPPED: Final = Family(
    "kvturn_lease_store_dropped_records_total",
    "counter",
    "Records that etcd was too slow for or refused; verdicts know less without them.",
)
STORE_FAILURES: Final = Family(
    "kvturn_lease_store_failures_total",
    "counter",
    "What etcd did not do: elect, renew (the leadership) or write (records).",
    ("operation",),
)

FAMILIES: Final = (
    LEADING,
    TERM_AGE,
    TERMS,
    ELECTIONS,
    LEASES,
    GRANTS,
    INHERITED,
    GRANTS_REFUSED,
    RELEASES,
    READS_GRANTED,
    READS_REFUSED,
    READS_ENDED,
    REGISTRATIONS,
    SESSIONS_ENDED,
    HEARTBEATS,
    ENGINES,
    ENGINE_LEASES,
    ENGINE_BLOCKS,
    ENGINE_TOKENS,
    ENGINE_MEMORY,
    ENGINE_AGE,
    CONVERSATIONS,
    ROUTER_SESSIONS,
    TURNS_IN_FLIGHT,
    CALLS,
    STORE_WRITE,
    RENEWAL,
    STORE_WAITING,
    STORE_DROPPED,
    STORE_FAILURES,
    SPANS,
    *process_families(),
)


class LeaseMetrics:
    """Looks at one lease service."""

    def __init__(
        self, servicer: LeaseServicer, clock_ns: Callable[[], int], spans: SpanQueue | None = None
    ) -> None:
        """`clock_ns` is CLOCK_BOOTTIME, `spans` what waits for a collector, None without one."""
        self._spans = spans
        self._servicer = servicer
        self._clock_ns = clock_ns

    @property
    def leads(self) -> bool:
        """Whether this process leads and answers."""
        return self._servicer.leads

    def page(self) -> Page:
        """Returns all that there is to tell now."""
        page = PageWriter()
        self._write_tally(page)
        leading = self._servicer.leading
        page.put(LEADING, int(leading is not None))
        now_ns = self._clock_ns()
        age_ns = 0 if leading is None else now_ns - self._servicer.term_began_ns
        page.put(TERM_AGE, age_ns / _SECOND_NS)
        page.put(STORE_WAITING, 0 if leading is None else leading.store.waiting)
        page.put_spans(SPANS, self._spans)
        page.put(ROUTER_SESSIONS, 0 if leading is None else leading.routers.count)
        page.put(TURNS_IN_FLIGHT, 0 if leading is None else leading.routers.turns_in_flight)
        if leading is not None:
            _write_census(page, leading.lessor.census(), now_ns)
        return {**page.page, **process_page()}

    def _write_tally(self, page: PageWriter) -> None:
        tally = self._servicer.tally
        page.put(TERMS, tally.terms)
        page.put_all(ELECTIONS, {"won": 0, "lost": 0, "failed": 0} | tally.elections)
        page.put(GRANTS, tally.grants)
        page.put(INHERITED, tally.inherited)
        page.put_all(GRANTS_REFUSED, tally.grants_refused)
        # Those that have not happened, too: a rate sees no first time where there was no sample.
        for reason in filter(None, ReleaseReason):
            page.put(RELEASES, tally.ended[reason], reason.name.lower())
        page.put(READS_GRANTED, tally.reads_granted)
        for verdict in filter(None, Verdict):
            page.put(READS_REFUSED, tally.reads_refused[verdict], verdict.name.lower())
        for outcome in ReadOutcome:
            page.put(READS_ENDED, tally.reads_ended[outcome], outcome.name.lower())
        page.put(READS_ENDED, tally.reads_overdue, "overdue")
        page.put(REGISTRATIONS, tally.registrations)
        page.put_all(SESSIONS_ENDED, dict.fromkeys(_ENDS, 0) | tally.sessions_ended)
        page.put(HEARTBEATS, tally.heartbeats)
        for (method, answer), count in tally.calls.items():
            page.put(CALLS, count, method, answer)
        page.put(STORE_WRITE, tally.store_write)
        page.put(RENEWAL, tally.renewal)
        page.put(STORE_DROPPED, tally.records_dropped)
        page.put_all(STORE_FAILURES, {"elect": 0, "renew": 0, "write": 0} | tally.store_failures)


def _write_census(page: PageWriter, census: Census, now_ns: int) -> None:
    states = {"active": census.active, "reading": census.reading, "ending": census.ending}
    page.put_all(LEASES, states)
    page.put(CONVERSATIONS, census.conversations)
    draining = sum(holding.draining for holding in census.holdings)
    page.put(ENGINES, len(census.holdings) - draining, "session")
    page.put(ENGINES, draining, "draining")
    page.put(ENGINES, census.away, "away")
    holdings = sorted(census.holdings, key=_engine_id)
    for holding in holdings[:ENGINES_NAMED_MAX]:
        _write_engine(page, holding.engine_id, [holding], now_ns)
    if rest := holdings[ENGINES_NAMED_MAX:]:
        _write_engine(page, OTHER, rest, now_ns)


def _write_engine(page: PageWriter, name: str, holdings: list[Holding], now_ns: int) -> None:
    """Writes one engine, or several as one: their sums, and the age of the oldest heartbeat."""
    page.put(ENGINE_LEASES, sum(each.leases for each in holdings), name)
    page.put(ENGINE_BLOCKS, sum(each.blocks for each in holdings), name)
    page.put(ENGINE_TOKENS, sum(each.tokens for each in holdings), name)
    oldest_ns = min(each.heartbeat_ns for each in holdings)
    page.put(ENGINE_AGE, (now_ns - oldest_ns) / _SECOND_NS, name)
    memories = [each.memory for each in holdings if each.memory is not None]
    free = sum(memory.free_blocks for memory in memories)
    retained = sum(memory.retained_blocks for memory in memories)
    total = sum(memory.total_blocks for memory in memories)
    page.put(ENGINE_MEMORY, max(total - free - retained, 0), name, "active")
    page.put(ENGINE_MEMORY, retained, name, "retained")
    page.put(ENGINE_MEMORY, free, name, "free")


def _engine_id(holding: Holding) -> str:
    return holding.engine_id
