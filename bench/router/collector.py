"""A receiver of traces over OTLP gRPC that counts spans: what traced routers export to.

    python -m bench.router.collector PORT

Prints where it listens, and after each export how many spans have come so far.
"""

from __future__ import annotations

import sys
import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Collector(TraceServiceServicer):
    """Counts."""

    def __init__(self) -> None:
        self._spans = 0

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """Takes spans."""
        del context
        self._spans += sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        print(f"{self._spans} spans", flush=True)
        return ExportTraceServiceResponse()


def main(argv: Sequence[str]) -> None:
    """Serves until the process is ended."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port(f"127.0.0.1:{argv[0]}")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
