"""The connector's spans: vLLM's tracer provider where it has one, else one of our own.

Spans carry ids, counts and times; never prompt text, digests or block lists.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_MS = 2_000
SHUTDOWN_TIMEOUT_MS = 1_000

logger = logging.getLogger("vllm.kvturn")

_propagator = TraceContextTextMapPropagator()


class SystemIds(IdGenerator):
    """Ids from the system's source: vLLM seeds Python's `random` alike in every engine, and with it
    prefill's and decode's spans would get the same ids."""

    def generate_span_id(self) -> int:
        """A span id, never 0."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """A trace id, never 0."""
        return secrets.randbits(128) or 1


class Telemetry:
    """Makes the connector's spans. Must be made in the process that makes them, after any fork."""

    def __init__(self, otlp_endpoint: str, engine_id: str) -> None:
        self._own_provider: TracerProvider | None = None
        existing = trace.get_tracer_provider()
        if isinstance(existing, TracerProvider):
            self._tracer: Tracer = existing.get_tracer("kvturn_connector")
            return
        if not otlp_endpoint:
            self._tracer = trace.NoOpTracer()
            return
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        # The library speaks of every failed attempt; OutageExporter speaks for it.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        exporter = OutageExporter(
            OTLPSpanExporter(
                endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https"), timeout=2
            ),
            otlp_endpoint,
        )
        provider = self._own_provider = TracerProvider(
            resource=Resource.create(
                {"service.name": "kvturn-connector", "service.instance.id": engine_id}
            ),
            id_generator=SystemIds(),
            shutdown_on_exit=False,  # It would wait for the collector; `shutdown` has a limit.
        )
        provider.add_span_processor(
            BatchSpanProcessor(
                exporter, schedule_delay_millis=500, export_timeout_millis=EXPORT_TIMEOUT_MS
            )
        )
        self._tracer = provider.get_tracer("kvturn_connector")

    def span(
        self,
        name: str,
        traceparent: str,
        start_unix_ns: int,
        attributes: Mapping[str, str | int | float | bool],
    ) -> Span:
        """Starts a span under the turn's router span; under none if `traceparent` is malformed."""
        return self._tracer.start_span(
            name,
            context=_context(traceparent),
            start_time=start_unix_ns,
            attributes=dict(attributes),
        )

    def shutdown(self) -> None:
        """Flushes within `SHUTDOWN_TIMEOUT_MS`; a collector that is down costs no more."""
        if self._own_provider is None:
            return
        # The SDK has no such limit: each batch may take the exporter's timeout.
        flush = threading.Thread(
            target=self._own_provider.shutdown, name="kvturn-span-flush", daemon=True
        )
        flush.start()
        flush.join(SHUTDOWN_TIMEOUT_MS / 1000)


class OutageExporter(SpanExporter):
    """Exports through another exporter, and logs one line when that begins to fail."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch of spans, which is dropped if that fails."""
        result = self._exporter.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            logger.warning("kvturn: spans cannot be sent to %s; they are dropped", self._endpoint)
        elif self._failing and not failing:
            logger.info("kvturn: spans are sent to %s again", self._endpoint)
        self._failing = failing
        return result

    def shutdown(self) -> None:
        """Ends the other exporter."""
        self._exporter.shutdown()


def metadata_of(span: Span) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes `span` the parent of what the call does; empty if not recording."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=trace.set_span_in_context(span))
    return tuple(carrier.items())


def _context(traceparent: str) -> Context | None:
    return _propagator.extract({"traceparent": traceparent}) if traceparent else None
