"""Spans on their way to a collector: OTLP over gRPC or HTTP, by OpenTelemetry's own exporters.

To be imported only where spans are exported: a lease service starts in a quarter less without it.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kvturn.otlp import HTTP, Destination
from kvturn.proto_wire import field

EXPORT_TIMEOUT_S: Final = 10
"""What OpenTelemetry gives one export by default: on a loaded machine the first takes seconds."""


class Envelope:
    """What says whose spans they are: a ResourceSpans and its ScopeSpans, without the spans.

    `service` names the process's kind, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES do;
    `fixed` are attributes of its resource whatever those say.
    """

    def __init__(self, service: str, fixed: Mapping[str, str] | None = None) -> None:
        said = OTELResourceDetector().detect().attributes
        own = {} if "service.name" in said else {"service.name": service}
        span = ReadableSpan(
            "",
            context=SpanContext(1, 1, is_remote=False),
            resource=Resource.create({**own, **(fixed or {})}),
            instrumentation_scope=InstrumentationScope(service),
        )
        # As the library writes it.
        (resource,) = encode_spans([span]).resource_spans
        (scope,) = resource.scope_spans
        scope.ClearField("spans")
        self._scope = scope.SerializeToString()
        resource.ClearField("scope_spans")
        self._resource = resource.SerializeToString()

    def request(self, spans: Sequence[bytes]) -> bytes:
        """Returns the ExportTraceServiceRequest of spans."""
        scoped = field(b"\x12", self._scope + b"".join(spans))
        return field(b"\x0a", self._resource + scoped)


class OtlpExporter:
    """Sends spans to a collector over OTLP, by gRPC or HTTP.

    The library connects, adds what its variables say (headers, certificates,
    compression), tries again and gives up; only the spans themselves are not its own.
    """

    def __init__(self, destination: Destination, envelope: Envelope) -> None:
        # The library logs each failed attempt; the queue speaks for it.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._exporter = (
            _http_exporter(destination.endpoint)
            if destination.protocol == HTTP
            else _ReadySpans(destination.endpoint)
        )
        self._envelope = envelope

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether the spans are delivered."""
        return self._exporter.export_ready(self._envelope.request(spans))

    def shutdown(self) -> None:
        """Closes the connection."""
        self._exporter.shutdown()


class _ReadyExporter(Protocol):
    """Sends requests that are in wire form already."""

    def export_ready(self, request: bytes) -> bool:
        """Returns whether it is delivered."""

    def shutdown(self) -> None:
        """Closes the connection."""


class _ReadySpans(OTLPSpanExporter):
    """The library's exporter over gRPC, for requests that are in wire form already."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            endpoint=endpoint,
            insecure=endpoint.startswith("http://"),
            timeout=EXPORT_TIMEOUT_S,
        )

    def export_ready(self, request: bytes) -> bool:
        return self._export(request) is SpanExportResult.SUCCESS  # type: ignore[arg-type]

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        channel = cast("grpc.Channel", self._channel)
        self._client = _ReadyClient(channel)  # type: ignore[assignment]

    def _translate_data(self, data: bytes) -> bytes:  # type: ignore[override]
        return data


class _ReadyClient:
    """The library's client, for a request that is in wire form already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=bytes,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )


def _http_exporter(endpoint: str) -> _ReadyExporter:
    # Imported where it is wanted: with its HTTP client it takes a tenth of a second.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    class ReadySpans(OTLPSpanExporter):
        """The library's exporter over HTTP, for requests that are in wire form already."""

        def export_ready(self, request: bytes) -> bool:
            return self._client.export(request).success

    return ReadySpans(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
