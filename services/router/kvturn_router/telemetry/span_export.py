"""The way of spans out of the process, on which no turn ever waits.

A bounded queue, and a thread that empties it. What does not fit or cannot be
delivered is dropped, with one warning until delivery works again.
"""

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol, cast

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kvturn_router.proto_wire import field

logger = logging.getLogger("kvturn.router.telemetry")

_QUEUE_MAX: Final = 16_384
_BATCH_MAX: Final = 4_096
_DELAY_S: Final = 0.5
_EXPORT_TIMEOUT_S: Final = 2
_SHUTDOWN_TIMEOUT_S: Final = 1.0


class SpanExporter(Protocol):
    """Delivers spans, each as a member of ScopeSpans. Called on the queue's thread."""

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether they are delivered."""

    def shutdown(self) -> None:
        """Lets go of the connection."""


class SpanQueue:
    """Spans waiting to be exported."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = self.dropped = 0
        """Spans delivered, and those that did not fit or could not be delivered."""
        self._spans: list[bytes] = []
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._ending = False
        self._delivering = True
        self._thread = threading.Thread(target=self._run, daemon=True, name="spans")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
        return len(self._spans)

    def put(self, span: bytes) -> None:
        """Takes a span, if there is room."""
        waiting = len(self._spans)
        if waiting < _QUEUE_MAX:
            self._spans.append(span)
        else:
            self.dropped += 1
        if waiting == _BATCH_MAX:
            self._wanted.set()

    def flush(self) -> None:
        """Exports what waits, and returns when that is done."""
        with self._lock:
            while batch := self._spans[:_BATCH_MAX]:
                del self._spans[: len(batch)]
                self._export(batch)

    def shutdown(self) -> None:
        """Exports what is left, for at most 1 s."""
        # A collector that hangs must not hold the process: the thread that
        # waits for it dies with the process.
        self._ending = True
        self._wanted.set()
        self._thread.join(_SHUTDOWN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ending:
            self._wanted.wait(_DELAY_S)
            self._wanted.clear()
            self.flush()
        self._exporter.shutdown()

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
            logger.warning("spans cannot be delivered (%s); they are dropped", reason)
        elif delivered and not self._delivering:
            logger.warning("spans are delivered again")
        self._delivering = delivered


class OtlpExporter:
    """Sends spans to `endpoint`, http://HOST:PORT, over OTLP gRPC.

    The library connects, adds what its variables say (headers, certificates,
    resource), tries again and gives up; only the spans themselves are not its own.
    """

    def __init__(self, endpoint: str) -> None:
        # The library logs each failed attempt; the queue speaks for it.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = _ReadySpans(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S
        )

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether the spans are delivered."""
        return self._exporter.export_ready(spans)

    def shutdown(self) -> None:
        """Closes the connection."""
        self._exporter.shutdown()


class _ReadySpans(OTLPSpanExporter):
    """The library's exporter, for spans that are in wire form already."""

    def export_ready(self, spans: Sequence[bytes]) -> bool:
        return self._export(spans) is SpanExportResult.SUCCESS  # type: ignore[arg-type]

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        channel = cast("grpc.Channel", self._channel)
        self._client = _ReadyClient(channel)  # type: ignore[assignment]

    def _translate_data(self, data: Sequence[bytes]) -> bytes:  # type: ignore[override]
        return request_bytes(data)


class _ReadyClient:
    """The library's client, for a request that is in wire form already."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=bytes,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )


def request_bytes(spans: Sequence[bytes]) -> bytes:
    """Returns the ExportTraceServiceRequest of spans, with the process's resource."""
    resource, scope = _envelope()
    return field(b"\x0a", resource + field(b"\x12", scope + b"".join(spans)))


@functools.cache
def _envelope() -> tuple[bytes, bytes]:
    """Returns what says whose spans they are, as the library writes it.

    A ResourceSpans without its ScopeSpans, and that without its spans.
    """
    span = ReadableSpan(
        "",
        context=SpanContext(1, 1, is_remote=False),
        resource=Resource.create({"service.name": "kvturn-router"}),
        instrumentation_scope=InstrumentationScope("kvturn.router"),
    )
    (resource,) = encode_spans([span]).resource_spans
    (scope,) = resource.scope_spans
    scope.ClearField("spans")
    scope_bytes = scope.SerializeToString()
    resource.ClearField("scope_spans")
    return resource.SerializeToString(), scope_bytes
