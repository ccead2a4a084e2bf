"""The way of spans out of the process, on which nobody ever waits.

A bounded queue, and a thread that empties it. What does not fit or cannot be
delivered is dropped, with one warning until delivery works again.
"""

import logging
import threading
import time
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

QUEUE_MAX: Final = 16_384
"""Spans waiting; more are dropped."""
BATCH_BYTES_MAX: Final = 3 << 20
"""Of one request; collectors take 4 MiB unless they are told otherwise."""
_WAKES_AT: Final = 4_096
"""Spans waiting that are not left to wait for the next time."""
_DELAY_S: Final = 0.5
EXPORT_TIMEOUT_S: Final = 2
SHUTDOWN_TIMEOUT_S: Final = 1.0


class SpanExporter(Protocol):
    """Delivers spans, each as a member of ScopeSpans. Called on the queue's thread."""

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether they are delivered."""

    def shutdown(self) -> None:
        """Lets go of the connection."""


class SpanQueue:
    """Spans waiting to be exported. To be made in the process that uses it, after any fork.

    `logger` is told when delivery begins to fail, and when it works again.
    """

    def __init__(
        self, exporter: SpanExporter, logger: logging.Logger, queue_max: int = QUEUE_MAX
    ) -> None:
        self._exporter = exporter
        self._logger = logger
        self._queue_max = queue_max
        self._spans: list[bytes] = []
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._ending = False
        self._delivering = True
        self.sent = self.dropped = 0
        """Spans delivered, and those that did not fit or could not be delivered."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="spans")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
        return len(self._spans)

    def put(self, span: bytes) -> None:
        """Takes a span, if there is room."""
        waiting = len(self._spans)
        if waiting < self._queue_max:
            self._spans.append(span)
        else:
            self.dropped += 1
        if waiting == _WAKES_AT:
            self._wanted.set()

    def flush(self) -> None:
        """Exports what waits, and returns when that is done."""
        with self._lock:
            while batch := self._batch():
                del self._spans[: len(batch)]
                self._export(batch)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Exports what is left, for at most `timeout_s`."""
        # A collector that hangs must not hold the process: the thread that
        # waits for it dies with the process.
        self._ending = True
        self._wanted.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ending:
            self._wanted.wait(_DELAY_S)
            self._wanted.clear()
            self.flush()
        self._exporter.shutdown()

    def _batch(self) -> list[bytes]:
        left = BATCH_BYTES_MAX
        for count, span in enumerate(self._spans):
            left -= len(span)
            if left < 0:
                return self._spans[: max(count, 1)]
        return self._spans[:]

    def _export(self, spans: Sequence[bytes]) -> None:
        began = time.monotonic()
        try:
            delivered = self._exporter.export(spans)
            reason = f"after {time.monotonic() - began:.1f} s"
        except Exception as error:  # a fault of the exporter is not the turn's
            delivered = False
            reason = type(error).__name__
        if delivered:
            self.sent += len(spans)
        else:
            self.dropped += len(spans)
        if not delivered and self._delivering:
            self._logger.warning("spans cannot be delivered (%s); they are dropped", reason)
        elif delivered and not self._delivering:
            self._logger.warning("spans are delivered again")
        self._delivering = delivered


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
