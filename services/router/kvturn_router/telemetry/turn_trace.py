"""One trace per turn.

Without an endpoint there are no spans, and a client's trace context goes on to
the engines as it came. A turn that is not sampled makes no span anywhere: the
engines get a context that says so.
"""

import logging

from kvturn.otlp import Destination
from kvturn.span_wire import SERVER
from kvturn.trace_context import TraceContext
from kvturn.tracing import UNRECORDED, Span, Tracer, Tracing
from kvturn_router.telemetry.sampling import Sampler

SERVICE_NAME = "kvturn-router"

logger = logging.getLogger("kvturn.router.telemetry")


def make_tracing(destination: Destination | None) -> Tracing:
    """Returns tracing that exports to a collector, or nowhere."""
    exporter = None
    if destination is not None:
        from kvturn.otlp_export import Envelope, OtlpExporter

        exporter = OtlpExporter(destination, Envelope(SERVICE_NAME))
    return Tracing(exporter, logger)


class TurnTracer:
    """Begins turns' traces. `tracer` is None where spans are off."""

    def __init__(self, tracer: Tracer | None, sampler: Sampler) -> None:
        self._tracer = tracer
        self._sampler = sampler

    def begin(self, parent: TraceContext | None) -> Span:
        """Begins the span of a turn, under the client's own if it sent one."""
        tracer = self._tracer
        if tracer is None:
            return UNRECORDED if parent is None else Span(parent.traceparent)
        if parent is not None:
            if self._sampler.samples(int(parent.trace_id, 16), parent.sampled):
                return tracer.under(parent.name_bytes, "turn", SERVER)
            return Span(f"00-{parent.trace_id}-{parent.span_id}-00")
        number = tracer.bits(128)
        trace_id = number.to_bytes(16)
        if self._sampler.samples(number, None):
            return tracer.root("turn", SERVER, trace_id)
        return Span(f"00-{trace_id.hex()}-{tracer.bits(64):016x}-00")
