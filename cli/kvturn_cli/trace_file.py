"""Traces in a file: OTLP/JSON, one export request a line.

Ids are in hex and enums are numbers, as OTLP/JSON demands and protobuf's own JSON does not.
"""

import errno
import json
import threading
from pathlib import Path
from typing import IO, Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

FILE_BYTES_MAX = 1 << 30
ID_FIELDS = ("traceId", "spanId", "parentSpanId")


def to_otlp_json(request: ExportTraceServiceRequest) -> dict[str, Any]:
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

    At `bytes_max` it moves to FILE.1, replacing the one before, and begins anew. Any thread may
    write.
    """

    def __init__(self, path: Path, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Opens `path` to append to. Raises OSError."""
        self._path = path
        self._bytes_max = bytes_max
        if path.exists() and not path.is_file():
            # A pipe would be waited for, and what is full is moved aside.
            raise OSError(errno.EINVAL, "is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        self._lock = threading.Lock()
        self._ended = False

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Writes a request; one without spans, with which a receiver is tried, gives no line.

        Raises OSError.
        """
        if request.resource_spans:
            body = json.dumps(to_otlp_json(request), separators=(",", ":"))
            with self._lock:
                if self._ended:
                    raise OSError("the receiver ends")
                self.write(body.encode())

    def write(self, line: bytes) -> None:
        """Writes one line. Raises OSError; the next line is tried anew."""
        if self._file.closed:  # It could not move aside.
            self._file = self._path.open("ab")
        if self._file.tell() + len(line) > self._bytes_max:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab")
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file, once a line that is being written is whole."""
        with self._lock:
            self._ended = True
            self._file.close()
