"""Traces of the lease service: one server span per question, in the caller's trace."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc

from kvturn.span_wire import SERVER
from kvturn.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvturn.otlp import Destination
    from kvturn.span_wire import Attribute

logger = logging.getLogger("kvturn.lease")

SERVICE_NAME = "kvturn-lease"
_METHODS = "/kvturn.v1.LeaseService/"

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

_told: ContextVar[dict[str, Attribute] | None] = ContextVar("told", default=None)


def make_tracing(destination: Destination | None) -> Tracing:
    """Returns tracing that exports to a collector, or nowhere."""
    exporter = None
    if destination is not None:
        from kvturn.otlp_export import Envelope, OtlpExporter

        exporter = OtlpExporter(destination, Envelope(SERVICE_NAME))
    return Tracing(exporter, logger)


def annotate(attributes: dict[str, Attribute]) -> None:
    """Adds attributes to the span of the question that is being answered, if it has one."""
    told = _told.get()
    if told is not None:
        told.update(attributes)


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps each unary method of LeaseService in a span named after it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

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
        traceparent = str(metadata["traceparent"])

        async def traced(request: Any, context: Any) -> Any:
            return await self._answer(name, traceparent, answer, request, context)

        return grpc.unary_unary_rpc_method_handler(
            traced, handler.request_deserializer, handler.response_serializer
        )

    async def _answer(
        self, name: str, traceparent: str, answer: Any, request: Any, context: Any
    ) -> Any:
        span = self._tracing.span(traceparent, name, SERVER)
        if not span.recorded:
            return await answer(request, context)
        told: dict[str, Attribute] = {
            "rpc.system": "grpc",
            "rpc.service": "kvturn.v1.LeaseService",
            "rpc.method": name,
        }
        token = _told.set(told)
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
            _told.reset(token)
            told["rpc.grpc.status_code"] = code.value[0]
            failed = code in _SERVER_FAULTS
            if failed:
                told["error.type"] = code.name
            span.end(told, fault=code.name if failed else None)
