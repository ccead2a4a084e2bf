"""A small OTLP/gRPC trace receiver that writes OTLP/JSON, one export request a line.

`kvturn up` and `kvturn demo` run it as a process of its own, so that the traces of every process
end in one file with no collector installed. Ids are in hex and enums are numbers, as OTLP/JSON
demands and protobuf's own JSON does not.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvturn_cli.arguments import Parser, port
from kvturn_cli.ports import is_free

MESSAGE_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 1 << 30
ID_FIELDS = ("traceId", "spanId", "parentSpanId")


def to_otlp_json(request: trace_service_pb2.ExportTraceServiceRequest) -> dict[str, Any]:
    """Returns the request as OTLP/JSON: ids in hex, enums as numbers, 64 bits as text."""
    body: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for resource, resource_body in zip(
        request.resource_spans, body.get("resourceSpans", ()), strict=True
    ):
        for scope, scope_body in zip(
            resource.scope_spans, resource_body.get("scopeSpans", ()), strict=True
        ):
            for span, span_body in zip(scope.spans, scope_body.get("spans", ()), strict=True):
                write_ids(span, span_body)
                for link, link_body in zip(span.links, span_body.get("links", ()), strict=True):
                    write_ids(link, link_body)
    return body


def write_ids(message: Any, body: dict[str, Any]) -> None:
    """Replaces a span's or link's ids, which protobuf's JSON gives in base64."""
    values = (
        message.trace_id,
        message.span_id,
        getattr(message, "parent_span_id", b""),
    )
    for field, value in zip(ID_FIELDS, values, strict=True):
        if value:
            body[field] = value.hex()


class TraceFile:
    """The file, one line per export request, complete after each write.

    At `bytes_max` it moves to FILE.1, replacing the one before, and begins anew.
    """

    def __init__(self, path: Path, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Opens `path` to append to. Raises OSError."""
        self._path = path
        self._bytes_max = bytes_max
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")

    def write(self, line: bytes) -> None:
        """Writes one line."""
        if self._file.tell() + len(line) > self._bytes_max:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab")
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TraceServicer(trace_service_pb2_grpc.TraceServiceServicer):
    """Writes each request to a TraceFile."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Answers when the line is in the file; RESOURCE_EXHAUSTED when it cannot be written.

        A request without spans, with which a collector is tried, gives no line.
        """
        try:
            if request.resource_spans:
                self._file.write(json_line(request))
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return trace_service_pb2.ExportTraceServiceResponse()


def json_line(request: trace_service_pb2.ExportTraceServiceRequest) -> bytes:
    """Returns the request as one line of OTLP/JSON, without the newline."""
    return json.dumps(to_otlp_json(request), separators=(",", ":")).encode()


async def serve(host: str, port_number: int, path: Path) -> int:
    """Receives until SIGTERM or SIGINT. Returns the exit code."""
    try:
        file = TraceFile(path)
    except OSError as error:
        print(f"kvturn otlp: --file {path}: {error.strerror}", file=sys.stderr)
        return 2
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ]
    )
    add_servicer = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_servicer(TraceServicer(file), server)  # type: ignore[no-untyped-call]
    # Asked first, because gRPC would log a refusal in lines of its own.
    bound = 0
    if port_number == 0 or is_free(port_number, host):
        bound = server.add_insecure_port(f"{host}:{port_number}")
    if bound == 0:
        print(
            f"kvturn otlp: cannot listen on {host}:{port_number}; choose another --port",
            file=sys.stderr,
        )
        return 2
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    print(f"kvturn otlp: receiving on {host}:{bound}, writing {path}", flush=True)
    await stop.wait()
    await server.stop(grace=1)
    file.close()
    return 0


def main(argv: list[str]) -> int:
    """Runs `kvturn otlp`."""
    parser = Parser("kvturn otlp", "Receives OTLP/gRPC traces and writes them as OTLP/JSON lines.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=4317, help="port; 0: any free one")
    parser.add_argument("--file", type=Path, required=True, help="file to append to")
    args = parser.parse_args(argv)
    return asyncio.run(serve(args.host, args.port, args.file))
