"""The HTTP half of `kvturn otlp`: POST /v1/traces, in protobuf, plain or gzip.

Exporters drop what is refused, so a refusal says what to send instead: as the standard's Status to
who sent protobuf, as JSON to everybody else.
"""

import contextlib
import json
import socket
import sys
import threading
import time
import zlib
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvturn_cli.trace_file import TraceFile

MESSAGE_BYTES_MAX: Final = 64 << 20
"""Of one export request, unpacked."""
CONNECTIONS_MAX: Final = 16
"""Connections at once, each with a thread; more are closed unread."""
PATH: Final = "/v1/traces"
SILENCE_S: Final = 10
"""How long a connection may say nothing."""
DISCARD_S: Final = 2
"""How long what follows a refused request is read and dropped, so that the client sees why."""
_READ_BYTES: Final = 64 << 10
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_GZIP_WBITS: Final = 31
_LENGTH_DIGITS_MAX: Final = 20


class TraceListener:
    """Takes exports over HTTP, from start() to stop()."""

    def __init__(self, file: TraceFile, host: str, port: int) -> None:
        """Takes the port. Raises OSError."""
        self._server = _Server(file, host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """The port that it has."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Takes no more connections; those that there are end with the process."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, file: TraceFile, host: str, port: int) -> None:
        self.file = file
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # The one between would look up the host's name.

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # There is no thread for it.
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes away is nothing to tell of.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S

    def do_POST(self) -> None:
        try:
            request = self._request()
            try:
                self.server.file.take(request)
            except OSError as error:
                raise _Refused(HTTPStatus.INSUFFICIENT_STORAGE, str(error)) from None
        except _Refused as refused:
            self._refuse(refused)
        else:
            self._answer(HTTPStatus.OK, _PROTOBUF, b"")

    def do_GET(self) -> None:
        self._refuse(
            _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"traces are received here: POST {PATH}")
        )

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _request(self) -> ExportTraceServiceRequest:
        """Reads the request. Raises _Refused."""
        if self.path.partition("?")[0] != PATH:
            raise _Refused(HTTPStatus.NOT_FOUND, f"only traces are received here: POST {PATH}")
        kind = self.headers.get_content_type()
        if kind != _PROTOBUF:
            raise _Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"send {_PROTOBUF}, not {kind} (OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)",
            )
        try:
            return ExportTraceServiceRequest.FromString(self._unpacked(self._body()))
        except DecodeError:
            problem = "the body is no ExportTraceServiceRequest"
            raise _Refused(HTTPStatus.BAD_REQUEST, problem) from None

    def _body(self) -> bytes:
        digits = self.headers.get("content-length", "")
        if not (digits.isascii() and digits.isdecimal()):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send a content-length")
        # Python reads no number of thousands of digits.
        length = int(digits) if len(digits) <= _LENGTH_DIGITS_MAX else MESSAGE_BYTES_MAX + 1
        if length > MESSAGE_BYTES_MAX:
            raise _too_large()
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionResetError
        return body

    def _unpacked(self, body: bytes) -> bytes:
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return body
        if encoding != "gzip":
            problem = f"send gzip or nothing as content-encoding, not {encoding}"
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem)
        unpacker = zlib.decompressobj(_GZIP_WBITS)
        try:
            unpacked = unpacker.decompress(body, MESSAGE_BYTES_MAX + 1)
        except zlib.error as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body is no gzip: {error}") from None
        if len(unpacked) > MESSAGE_BYTES_MAX:
            raise _too_large()
        if not unpacker.eof:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body is no gzip: it is cut")
        return unpacked

    def _refuse(self, refused: _Refused) -> None:
        # What is left of the request is not read: it would be taken for the next one.
        self.close_connection = True
        if self.headers.get_content_type() == _PROTOBUF:
            body = Status(message=str(refused)).SerializeToString()
            self._answer(refused.status, _PROTOBUF, body)
        else:
            self._answer(refused.status, _JSON, json.dumps({"message": str(refused)}).encode())
        self._discard()

    def _discard(self) -> None:
        # A client that still writes would see its connection break, and not the answer.
        end_s = time.monotonic() + DISCARD_S
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while (left_s := end_s - time.monotonic()) > 0:
                self.connection.settimeout(left_s)
                if not self.connection.recv(_READ_BYTES):
                    break

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing: who is refused is told."""


def _too_large() -> _Refused:
    problem = f"an export request has at most {MESSAGE_BYTES_MAX >> 20} MiB; send smaller batches"
    return _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem)
