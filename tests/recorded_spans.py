"""Spans that a router exports, as a test can read them."""

from collections.abc import Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from kvturn_router.telemetry.span_export import request_bytes
from kvturn_router.telemetry.turn_trace import Telemetry


def export_of(spans: Sequence[bytes]) -> ExportTraceServiceRequest:
    """Returns what a collector reads of exported spans."""
    return ExportTraceServiceRequest.FromString(request_bytes(spans))


def told(span: trace_pb2.Span) -> dict[str, str | int | float]:
    """Returns a span's attributes."""
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in span.attributes
    }


class Recording:
    """Telemetry that a test can read."""

    def __init__(self) -> None:
        self._spans: list[bytes] = []
        self.telemetry = Telemetry(self)

    def export(self, spans: Sequence[bytes]) -> bool:
        self._spans += spans
        return True

    def shutdown(self) -> None:
        return

    def spans(self, trace: str | None = None) -> list[trace_pb2.Span]:
        self.telemetry.flush()
        (resource_spans,) = export_of(self._spans).resource_spans
        (attribute,) = [
            item for item in resource_spans.resource.attributes if item.key == "service.name"
        ]
        assert attribute.value.string_value == "kvturn-router"
        (scope,) = resource_spans.scope_spans
        return [span for span in scope.spans if trace is None or span.trace_id.hex() == trace]

    def turn(self, trace: str | None = None) -> trace_pb2.Span:
        (turn,) = [span for span in self.spans(trace) if span.name == "turn"]
        return turn
