"""A small OTLP trace receiver, over gRPC and HTTP, that writes OTLP/JSON lines.

`kvturn up` and `kvturn demo` run it as a process of its own, so that the traces of every process
end in one file with no collector installed.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvturn.hangup import on_hangup
from kvturn.open_files import raise_limit
from kvturn.streams import announce
from kvturn_cli.arguments import Parser, host, port
from kvturn_cli.otlp_http import MESSAGE_BYTES_MAX, TraceListener
from kvturn_cli.ports import is_free
from kvturn_cli.trace_file import TraceFile


class TraceServicer(trace_service_pb2_grpc.TraceServiceServicer):
    """Writes each request to a TraceFile."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Answers when the line is in the file; RESOURCE_EXHAUSTED when it cannot be written."""
        try:
            self._file.take(request)
        except OSError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return trace_service_pb2.ExportTraceServiceResponse()


async def serve(host: str, port_number: int, http_port: int, path: Path) -> int:
    """Receives until SIGTERM or SIGINT. Returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: those end with the loop, and a second signal would kill us.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    on_hangup(lambda: loop.call_soon_threadsafe(stop.set))
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
        return cannot_listen(host, port_number, "--port")
    try:
        over_http = TraceListener(file, host, http_port)
    except OSError:
        return cannot_listen(host, http_port, "--http-port")
    await server.start()
    over_http.start()
    announce(
        f"kvturn otlp: receiving on {host}:{bound} (gRPC) and {host}:{over_http.port} (HTTP),"
        f" writing {path}"
    )
    await stop.wait()
    await server.stop(grace=1)
    over_http.stop()
    file.close()
    return 0


def cannot_listen(host: str, port_number: int, flag: str) -> int:
    """Says that a port is taken. Returns the exit code."""
    print(
        f"kvturn otlp: cannot listen on {host}:{port_number}; choose another {flag}",
        file=sys.stderr,
    )
    return 2


def main(argv: list[str]) -> int:
    """Runs `kvturn otlp`."""
    parser = Parser(
        "kvturn otlp", "Receives OTLP traces over gRPC and HTTP and writes them as OTLP/JSON lines."
    )
    parser.add_argument("--host", type=host, default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=4317, help="port for gRPC; 0: any free one")
    parser.add_argument(
        "--http-port", type=port, default=4318, help="port for HTTP; 0: any free one"
    )
    parser.add_argument("--file", type=Path, required=True, help="file to append to")
    args = parser.parse_args(argv)
    if problem := raise_limit():
        print(f"kvturn otlp: {problem}", file=sys.stderr)
        return 1
    return asyncio.run(serve(args.host, args.port, args.http_port, args.file))
