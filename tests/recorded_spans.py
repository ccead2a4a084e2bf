"""Spans that a process exports, as a test can read them."""

import asyncio
import logging
from collections.abc import Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from stub_engine import GUARD_S

from kvturn.otlp import GRPC, destination_of
from kvturn.otlp_export import Envelope
from kvturn.tracing import Tracing
from kvturn_router.telemetry.turn_trace import make_tracing

Told = dict[str, str | bool | int | float]


def export_of(spans: Sequence[bytes], service: str = "kvturn-router") -> ExportTraceServiceRequest:
    """Returns what a collector reads of exported spans."""
    return ExportTraceServiceRequest.FromString(Envelope(service).request(spans))


def told(span: trace_pb2.Span) -> Told:
    """Returns a span's attributes."""
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in span.attributes
    }


def otlp_tracing(url: str, protocol: str = GRPC) -> Tracing:
    """Returns tracing that exports as a router does."""
    return make_tracing(destination_of(url, protocol, {}))


def untraced() -> Tracing:
    """Returns tracing that exports nowhere."""
    return Tracing(None, logging.getLogger("kvturn.test"))


class Recording:
    """Tracing that a test can read."""

    def __init__(self) -> None:
        self.exported: list[bytes] = []
        self.tracing = Tracing(self, logging.getLogger("kvturn.test"))

    def export(self, spans: Sequence[bytes]) -> bool:
        self.exported += spans
        return True

    def shutdown(self) -> None:
        return

    def spans(self, trace: str | None = None) -> list[trace_pb2.Span]:
        self.tracing.flush()
        (resource_spans,) = export_of(self.exported).resource_spans
        (scope,) = resource_spans.scope_spans
        return [span for span in scope.spans if trace is None or span.trace_id.hex() == trace]

    async def until(self, count: int) -> list[trace_pb2.Span]:
        """Waits for so many spans: a server's may end after its caller has the answer."""
        async with asyncio.timeout(GUARD_S):
            while len(self.exported) < count:
                await asyncio.sleep(0.005)
                self.tracing.flush()
        return self.spans()

    def turn(self, trace: str | None = None) -> trace_pb2.Span:
        (turn,) = [span for span in self.spans(trace) if span.name == "turn"]
        return turn
