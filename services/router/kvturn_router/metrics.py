"""What one router tells at /metrics. docs/metrics.md says what each number means.

Turns are counted in `turn/counts.py`; all else is looked at when somebody asks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvturn.metrics import (
    ENGINES_NAMED_MAX,
    OTHER,
    Family,
    Histogram,
    Page,
    PageWriter,
)
from kvturn.metrics_page import process_families, process_page
from kvturn.span_export import SpanQueue
from kvturn_router.engines.admission import WAIT
from kvturn_router.engines.engine import Engine
from kvturn_router.front.body_budget import BodyBudget
from kvturn_router.front.gate import Gate
from kvturn_router.front.grpc_front import GrpcFront
from kvturn_router.front.http_wire import Listener
from kvturn_router.turn import counts
from kvturn_router.turn.forward import Forwarder
from kvturn_router.turn.releases import RELEASES

TURNS_IN_FLIGHT: Final = Family("kvturn_router_turns_in_flight", "gauge", "Turns being served.")
TURNS_MAX: Final = Family(
    "kvturn_router_turns_in_flight_limit", "gauge", "Most turns at once; more get 429."
)
QUEUED: Final = Family(
    "kvturn_router_queued_turns",
    "gauge",
    "Turns that wait for an engine with room, by the role that they wait for.",
    ("role",),
)
QUEUED_MAX: Final = Family(
    "kvturn_router_queued_turns_limit", "gauge", "Most turns that may wait; more get 429."
)
ENGINES: Final = Family(
    "kvturn_router_engines",
    "gauge",
    "Engines by role (prefill, decode, both) and state: usable, ejected (not healthy) or draining.",
    ("role", "state"),
)
ENGINE_IN_FLIGHT: Final = Family(
    "kvturn_router_engine_requests_in_flight",
    "gauge",
    "Requests that this router has given an engine and that are not answered.",
    ("engine", "role"),
)
ENGINE_REQUESTS: Final = Family(
    "kvturn_router_engine_requests_total",
    "counter",
    "Requests that this router has given an engine.",
    ("engine", "role"),
)
ERRORS: Final = Family(
    "kvturn_router_errors_total",
    "counter",
    "Requests answered with an error, by front (http, grpc) and reason; ENGINE_REFUSED is an "
    "engine's own answer passed on.",
    ("front", "reason"),
)
BODY_BYTES: Final = Family(
    "kvturn_router_body_bytes", "gauge", "Bytes of request bodies held in memory."
)
BODY_BYTES_MAX: Final = Family(
    "kvturn_router_body_bytes_limit", "gauge", "Most bytes of bodies at once; more get 503."
)
CONNECTIONS: Final = Family(
    "kvturn_router_client_connections", "gauge", "HTTP connections of clients."
)
CONVERSATIONS: Final = Family(
    "kvturn_router_conversations",
    "gauge",
    "Conversations that the router itself remembers; with a lease service that does.",
)
SESSION_UP: Final = Family(
    "kvturn_router_lease_session_up",
    "gauge",
    "1 while the lease service answers the router's session, 0 while not or without one.",
)
SESSIONS: Final = Family(
    "kvturn_router_lease_sessions_total",
    "counter",
    "Sessions with the lease service that the router has begun.",
)
SPANS: Final = Family(
    "kvturn_router_spans_total",
    "counter",
    "Spans by what became of them: sent, or dropped because they did not fit or could not be "
    "delivered.",
    ("outcome",),
)
SPANS_WAITING: Final = Family("kvturn_router_spans_waiting", "gauge", "Spans that wait to be sent.")
LOOP_LAG: Final = Family(
    "kvturn_router_loop_lag_seconds",
    "histogram",
    "How much later than asked for the event loop ran a timer, looked at once a second: what any "
    "event has to wait for others.",
    (),
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)

FAMILIES: Final = (
    *counts.FAMILIES,
    RELEASES,
    WAIT,
    TURNS_IN_FLIGHT,
    TURNS_MAX,
    QUEUED,
    QUEUED_MAX,
    ENGINES,
    ENGINE_IN_FLIGHT,
    ENGINE_REQUESTS,
    ERRORS,
    BODY_BYTES,
    BODY_BYTES_MAX,
    CONNECTIONS,
    CONVERSATIONS,
    SESSION_UP,
    SESSIONS,
    SPANS,
    SPANS_WAITING,
    LOOP_LAG,
    *process_families(),
)


@dataclass(frozen=True, slots=True)
class RouterMetrics:
    """Looks at the parts of one router. `grpc` and `spans` are None where they are off.

    `lag` has taken by how many seconds the event loop was late.
    """

    forwarder: Forwarder
    gate: Gate
    bodies: BodyBudget
    listener: Listener
    grpc: GrpcFront | None
    spans: SpanQueue | None
    lag: Histogram

    def page(self) -> Page:
        """Returns all that there is to tell now."""
        page = PageWriter()
        self.forwarder.counts.write(page)
        self.forwarder.releases.write(page)
        self._write_load(page)
        self._write_engines(page)
        for front, errors in self._errors():
            for reason, count in errors.items():
                page.put(ERRORS, count, front, reason)
        lease = self.forwarder.lease
        page.put(SESSION_UP, int(lease is not None and lease.session.up))
        page.put(SESSIONS, 0 if lease is None else lease.session.sessions)
        page.put_spans(SPANS, self.spans)
        page.put(SPANS_WAITING, 0 if self.spans is None else self.spans.waiting)
        return {**page.page, **process_page()}

    def _write_load(self, page: PageWriter) -> None:
        admission = self.forwarder.admission
        page.put_all(WAIT, admission.waits)
        page.put(TURNS_IN_FLIGHT, self.gate.turns)
        page.put(TURNS_MAX, self.gate.turns_max)
        page.put_all(QUEUED, admission.room.depths())
        page.put(QUEUED_MAX, admission.room.places)
        page.put(BODY_BYTES, self.bodies.bytes_max - self.bodies.left)
        page.put(BODY_BYTES_MAX, self.bodies.bytes_max)
        page.put(CONNECTIONS, len(self.listener.connections))
        page.put(CONVERSATIONS, len(self.forwarder.book))
        page.put(LOOP_LAG, self.lag)

    def _write_engines(self, page: PageWriter) -> None:
        states: dict[tuple[str, str], int] = {}
        loads: dict[tuple[str, str], list[int]] = {}
        for number, engine in enumerate(sorted(self.forwarder.fleet, key=_url)):
            key = (engine.role, _state(engine))
            states[key] = states.get(key, 0) + 1
            named = (engine.url if number < ENGINES_NAMED_MAX else OTHER, engine.role)
            load = loads.setdefault(named, [0, 0])
            load[0] += engine.in_flight
            load[1] += engine.served
        for (role, state), count in states.items():
            page.put(ENGINES, count, role, state)
        for named, (in_flight, served) in loads.items():
            page.put(ENGINE_IN_FLIGHT, in_flight, *named)
            page.put(ENGINE_REQUESTS, served, *named)

    def _errors(self) -> Iterator[tuple[str, dict[str, int]]]:
        yield "http", self.listener.errors.by_reason
        if self.grpc is not None:
            yield "grpc", self.grpc.errors.by_reason


def _url(engine: Engine) -> str:
    return engine.url


def _state(engine: Engine) -> str:
    if not engine.usable:
        return "ejected"
    return "draining" if engine.draining else "usable"
