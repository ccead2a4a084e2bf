"""Traces of the lease service: one server span per question, in the caller's trace."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger("kvturn.lease")

SERVICE_NAME = "kvturn-lease"
_METHODS = "/kvturn.v1.LeaseService/"
_EXPORT_TIMEOUT_S = 2.0
_SPANS_QUEUED_MAX = 4_096
_FLUSH_TIMEOUT_S = 0.5

# Codes that say that the server, not its caller, is at fault.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where spans go; without a provider they go nowhere and cost next to nothing."""

    tracer: trace.Tracer
    provider: TracerProvider | None = None

    async def close(self) -> None:
        """Sends what is left, for half a second at most, whatever the collector does."""
        if self.provider is None:
            return
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down(provider: TracerProvider) -> None:
            provider.shutdown()
            loop.call_soon_threadsafe(done.set)

        # A thread of its own that nobody joins: shutting down may wait for a dead collector.
        threading.Thread(target=shut_down, args=(self.provider,), daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), _FLUSH_TIMEOUT_S)
        except TimeoutError:
            return


class OutageExporter(SpanExporter):
    """Exports through another exporter, and logs one line per outage instead of one per batch."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch of spans, which is dropped if that fails."""
        result = self._exporter.export(spans)
        failing = result != SpanExportResult.SUCCESS
        if failing and not self._failing:
            logger.warning("traces cannot be sent to %s; they are dropped", self._endpoint)
        elif self._failing and not failing:
            logger.info("traces are sent to %s again", self._endpoint)
        self._failing = failing
        return result

    def shutdown(self) -> None:
        """Ends the other exporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flushes the other exporter."""
        return self._exporter.force_flush(timeout_millis)


def make_telemetry(otlp_endpoint: str) -> Telemetry:
    """Returns telemetry that exports to an OTLP gRPC endpoint, or nowhere if it is empty."""
    if not otlp_endpoint:
        return Telemetry(trace.NoOpTracer())
    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE_NAME}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(
        endpoint=otlp_endpoint,
        insecure=otlp_endpoint.startswith("http://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    logging.getLogger(OTLPSpanExporter.__module__.rpartition(".")[0]).setLevel(logging.CRITICAL)
    quiet = OutageExporter(exporter, otlp_endpoint)
    provider.add_span_processor(BatchSpanProcessor(quiet, max_queue_size=_SPANS_QUEUED_MAX))
    return Telemetry(provider.get_tracer(SERVICE_NAME), provider)


def caller_context(traceparent: str) -> Any:
    """Returns the trace context of a W3C traceparent; an empty or malformed one starts a trace."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps each unary method of LeaseService in a span named after it."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Returns the method's handler, wrapped if it is one question in somebody's trace.

        What comes without a trace context (touches of many turns in one, a command line) belongs
        to no turn, and would only fill the collector with traces of one span.
        """
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        unary = handler is not None and handler.unary_unary is not None
        if not unary or not method.startswith(_METHODS) or "traceparent" not in metadata:
            return handler
        answer, name = handler.unary_unary, method.removeprefix(_METHODS)

        async def traced(request: Any, context: Any) -> Any:
            return await self._answer(name, metadata, answer, request, context)

        return grpc.unary_unary_rpc_method_handler(
            traced, handler.request_deserializer, handler.response_serializer
        )

    async def _answer(
        self, name: str, metadata: dict[str, Any], answer: Any, request: Any, context: Any
    ) -> Any:
        with self._tracer.start_as_current_span(
            name,
            context=caller_context(str(metadata.get("traceparent", ""))),
            kind=SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": "kvturn.v1.LeaseService",
                "rpc.method": name,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            code = grpc.StatusCode.OK
            try:
                return await answer(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except Exception:
                code = grpc.StatusCode.UNKNOWN
                raise
            finally:
                span.set_attribute("rpc.grpc.status_code", code.value[0])
                if code in _SERVER_FAULTS:
                    span.set_status(Status(StatusCode.ERROR, code.name))
