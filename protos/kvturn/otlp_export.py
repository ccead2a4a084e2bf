"""Spans on their way to a collector: OTLP over gRPC or HTTP.

To be imported only where spans are exported: a lease service starts in a quarter less without it.
"""

import gzip
import os
import threading
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from random import uniform
from typing import Final, Protocol
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kvturn.collector_access import collector_headers, collector_tls
from kvturn.otlp import HTTP, Destination, compressed
from kvturn.proto_wire import field

EXPORT_TIMEOUT_S: Final = 10
"""What OpenTelemetry gives one export by default: on a loaded machine the first takes seconds."""
_PAUSE_S: Final = 1.0
"""Before a second attempt; each further one doubles it."""
# Of its own, so that a new connection does not wait out the failures of the one before it.
_CHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)
_AWAY_CODES: Final = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    }
)
_AWAY_STATUSES: Final = frozenset({429, 502, 503, 504})


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

    It tries again while a collector has no room or is away, for EXPORT_TIMEOUT_S, and connects anew
    after each failure: to where the name leads by then, with what the files of TLS hold by then.
    """

    def __init__(self, destination: Destination, envelope: Envelope) -> None:
        self._destination = destination
        self._envelope = envelope
        self._connection: _Connection | None = None
        self._closed = threading.Event()

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether the spans are delivered. Raises FileFault for wrong files of TLS."""
        request = self._envelope.request(spans)
        ends_s = time.monotonic() + EXPORT_TIMEOUT_S
        pause_s = _PAUSE_S
        while (left_s := ends_s - time.monotonic()) > 0 and not self._closed.is_set():
            try:
                return self._sent(request, left_s)
            except _AwayError:
                # Not all at once, when a collector is back that many wait for.
                wait_s = pause_s * uniform(0.8, 1.2)
            if time.monotonic() + wait_s > ends_s:
                break
            self._closed.wait(wait_s)
            pause_s *= 2
        return False

    def shutdown(self) -> None:
        """Closes the connection; an export that is under way fails."""
        self._closed.set()
        if (connection := self._connection) is not None:
            connection.close()

    def _sent(self, request: bytes, timeout_s: float) -> bool:
        if self._connection is None:
            connect = _HttpConnection if self._destination.protocol == HTTP else _GrpcConnection
            self._connection = connect(self._destination.endpoint, os.environ)
        sent = False
        try:
            sent = self._connection.send(request, timeout_s)
        finally:
            if not sent:
                self._connection.close()
                self._connection = None
        return sent


class _AwayError(Exception):
    """The collector is away, or has no room: it may take the same request later."""


class _Connection(Protocol):
    """To a collector, for requests in wire form."""

    def send(self, request: bytes, timeout_s: float) -> bool:
        """Returns whether it is delivered. Raises _AwayError."""

    def close(self) -> None:
        """Lets go of it."""


class _GrpcConnection:
    def __init__(self, endpoint: str, environ: Mapping[str, str]) -> None:
        target = urlsplit(endpoint).netloc
        compression = grpc.Compression.Gzip if compressed(environ) else None
        if endpoint.startswith("https://"):
            tls = collector_tls(environ).credentials()
            self._channel = grpc.secure_channel(target, tls, _CHANNEL, compression)
        else:
            self._channel = grpc.insecure_channel(target, _CHANNEL, compression)
        # The library's own stub takes requests as messages alone.
        self._export = self._channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        self._headers = tuple(collector_headers(environ).items())

    def send(self, request: bytes, timeout_s: float) -> bool:
        try:
            self._export(request, timeout=timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            if error.code() in _AWAY_CODES:
                raise _AwayError from None
            return False
        return True

    def close(self) -> None:
        self._channel.close()


class _HttpConnection:
    """By the standard library, which goes by HTTP_PROXY and its like as well."""

    def __init__(self, endpoint: str, environ: Mapping[str, str]) -> None:
        tls = collector_tls(environ).context() if endpoint.startswith("https://") else None
        self._opener = build_opener(HTTPSHandler(context=tls), _Unmoved())
        self._endpoint = endpoint
        self._packs = compressed(environ)
        self._headers = {
            "User-Agent": "kvturn",
            **collector_headers(environ),
            "Content-Type": "application/x-protobuf",
            **({"Content-Encoding": "gzip"} if self._packs else {}),
        }

    def send(self, request: bytes, timeout_s: float) -> bool:
        body = gzip.compress(request, mtime=0) if self._packs else request
        try:
            self._opener.open(Request(self._endpoint, body, self._headers), None, timeout_s).close()
        except HTTPError as refusal:
            refusal.close()
            if refusal.code in _AWAY_STATUSES:
                raise _AwayError from None
            return False
        except (OSError, HTTPException):
            raise _AwayError from None
        return True

    def close(self) -> None:
        self._opener.close()


class _Unmoved(HTTPRedirectHandler):
    """Takes a redirection for a refusal: what follows it asks without the spans."""

    def redirect_request(self, *_: object) -> None:
        return
