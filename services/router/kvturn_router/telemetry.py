"""One trace per turn, and an exporter that no turn ever waits for.

Spans are made with an explicit parent and never attached to a context, so
turns that interleave on one event loop cannot mix. They are exported by a
bounded queue on a thread of its own; what does not fit or cannot be delivered
is dropped, with one warning until delivery works again.

Without an endpoint there are no spans, and a client's trace context goes on to
the engines as it came.
"""

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

logger = logging.getLogger("kvturn.router.telemetry")

Attribute = str | int | float
Attributes = Mapping[str, Attribute]

_QUEUE_MAX: Final = 4096
_BATCH_MAX: Final = 512
_EXPORT_TIMEOUT_S: Final = 2
_SHUTDOWN_TIMEOUT_S: Final = 1.0

_traceparent = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """A W3C trace context that came with a request."""

    traceparent: str
    trace_id: int
    span_id: int
    flags: int


def trace_context(header: str | None) -> TraceContext | None:
    """Returns the context of a traceparent header; None if absent or malformed."""
    found = _traceparent.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    # Version 00 has four parts, later ones may have more; ff is no version.
    if version == "ff" or (version == "00" and more) or not trace_id or not span_id:
        return None
    traceparent = f"00-{trace}-{span}-{flags}"
    return TraceContext(traceparent, trace_id, span_id, int(flags, 16))


class TurnSpan:
    """One span of a turn, or nothing where spans are off.

    `traceparent` is what to send along with calls made under it; None if there
    is no trace at all.
    """

    __slots__ = ("_span", "_tracer", "traceparent")

    def __init__(self, tracer: Tracer | None, span: Span | None, traceparent: str | None) -> None:
        self._tracer = tracer
        self._span = span
        self.traceparent = traceparent

    @property
    def recorded(self) -> bool:
        """Whether anything reads what `end` is told."""
        return self._span is not None and self._span.is_recording()

    def child(self, name: str) -> "TurnSpan":
        """Begins a span under this one."""
        if self._tracer is None or self._span is None:
            return self
        span = self._tracer.start_span(
            name, context=set_span_in_context(self._span), kind=SpanKind.CLIENT
        )
        return TurnSpan(self._tracer, span, _written(span))

    def end(self, attributes: Attributes | None = None, *, fault: str | None = None) -> None:
        """Ends the span; `fault` marks it as failed and says why."""
        if self._span is None:
            return
        if attributes:
            self._span.set_attributes(attributes)
        if fault is not None:
            self._span.set_status(Status(StatusCode.ERROR, fault))
        self._span.end()


def _written(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class TurnTracer:
    """Begins turns' traces. `tracer` is None where spans are off."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def begin(self, parent: TraceContext | None) -> TurnSpan:
        """Begins the span of a turn, under the client's own if it sent one."""
        if self._tracer is None:
            return TurnSpan(None, None, parent.traceparent if parent else None)
        context = None
        if parent is not None:
            context = set_span_in_context(
                NonRecordingSpan(
                    SpanContext(
                        parent.trace_id,
                        parent.span_id,
                        is_remote=True,
                        trace_flags=TraceFlags(parent.flags),
                        trace_state=TraceState(),
                    )
                )
            )
        span = self._tracer.start_span("turn", context=context, kind=SpanKind.SERVER)
        return TurnSpan(self._tracer, span, _written(span))


class Telemetry:
    """The process's tracer and its way out.

    `exporter` is None where spans are off.
    """

    def __init__(self, exporter: SpanExporter | None) -> None:
        self._provider: TracerProvider | None = None
        if exporter is None:
            self.turns = TurnTracer(None)
            return
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create({"service.name": "kvturn-router"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _QuietExporter(exporter),
                max_queue_size=_QUEUE_MAX,
                max_export_batch_size=_BATCH_MAX,
                schedule_delay_millis=500,
                export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
            )
        )
        self.turns = TurnTracer(self._provider.get_tracer("kvturn.router"))

    def shutdown(self) -> None:
        """Sends what is left, for at most 1 s."""
        if self._provider is None:
            return
        # A collector that hangs must not hold the process: the thread that
        # waits for it dies with the process.
        waiter = threading.Thread(target=self._provider.shutdown, daemon=True)
        waiter.start()
        waiter.join(_SHUTDOWN_TIMEOUT_S)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Returns an OTLP gRPC exporter to `http://HOST:PORT`."""
    return OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S
    )


class _QuietExporter(SpanExporter):
    """Warns once when spans cannot be delivered, not once per batch."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._delivering = True
        # The library logs each failed attempt; this class speaks for it.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        began = time.monotonic()
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # a fault of the exporter is not the turn's
            result = SpanExportResult.FAILURE
            reason = type(error).__name__
        else:
            reason = f"after {time.monotonic() - began:.1f} s"
        delivered = result is SpanExportResult.SUCCESS
        if not delivered and self._delivering:
            logger.warning("spans cannot be delivered (%s); they are dropped", reason)
        elif delivered and not self._delivering:
            logger.warning("spans are delivered again")
        self._delivering = delivered
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
