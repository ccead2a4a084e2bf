"""The connector's spans.

They go where `kvturn_otlp_endpoint` says, else where vLLM's own go: vLLM tells its
processes by the standard's variables. Spans carry ids, counts and times; never
prompt text, digests or block lists.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvturn.tracing import Tracing

if TYPE_CHECKING:
    from kvturn.otlp import Destination
    from kvturn.tracing import Span

SERVICE_NAME = "kvturn-connector"

logger = logging.getLogger("vllm.kvturn")


def make_tracing(destination: Destination | None, engine_id: str) -> Tracing:
    """Returns tracing that exports to a collector, or nowhere.

    To be called in the process that makes the spans, after any fork.
    """
    exporter = None
    if destination is not None:
        from kvturn.otlp_export import Envelope, OtlpExporter

        # OTEL_SERVICE_NAME is vLLM's own.
        own = {"service.name": SERVICE_NAME, "service.instance.id": engine_id}
        envelope = Envelope(SERVICE_NAME, own)
        exporter = OtlpExporter(destination, envelope)
    return Tracing(exporter, logger)


def metadata_of(span: Span) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes `span` the parent of what the call does; empty if not recorded."""
    return (("traceparent", span.traceparent),) if span.traceparent else ()
