"""The trace receiver: what a real exporter sends ends in the file as OTLP/JSON."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from google.rpc.status_pb2 import Status
from grpc import insecure_channel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind

from kvturn_cli import otlp_http
from kvturn_cli.otlp_http import TraceListener
from kvturn_cli.ports import pick_free
from kvturn_cli.trace_file import TraceFile, to_otlp_json

SPANS = trace_service_pb2.ExportTraceServiceRequest()
SPANS.resource_spans.add().scope_spans.add().spans.add(name="turn", trace_id=b"t" * 16)
PROTOBUF = "application/x-protobuf"


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Runs `kvturn otlp`; gives its endpoints, gRPC's and HTTP's, and its file."""
    taken: set[int] = set()
    ports = [str(pick_free(taken)) for _ in range(2)]
    file = tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "kvturn_cli", "otlp", "--file", str(file)]
    command += ["--port", ports[0], "--http-port", ports[1]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "receiving" in process.stdout.readline()
    grpc_url, http_url = (f"http://127.0.0.1:{port}" for port in ports)
    yield grpc_url, http_url, file
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    process.stdout.close()


def test_real_exporters_spans_end_in_the_file(receiver: tuple[str, str, Path]) -> None:
    """Two spans, one the child of the other with a link: ids in hex, kinds as numbers.

    Over gRPC, over HTTP, and over HTTP with gzip, all to one file.
    """
    grpc_url, http_url, file = receiver
    with insecure_channel(grpc_url.removeprefix("http://")) as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=5)  # As kvturn doctor.
    traces = f"{http_url}/v1/traces"
    exporters = [
        OTLPSpanExporter(endpoint=grpc_url, insecure=True),
        HttpExporter(endpoint=traces),
        HttpExporter(endpoint=traces, compression=Compression.Gzip),
    ]
    seen = 0
    for exporter in exporters:
        provider = TracerProvider(resource=Resource.create({"service.name": "kvturn-router"}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span("turn", kind=SpanKind.SERVER) as parent:
            parent.set_attribute("kvturn.reused_tokens", 7)
            linked = parent.get_span_context()
            with tracer.start_as_current_span("prefill", links=[Link(linked)]) as child:
                child_id = child.get_span_context().span_id
        provider.shutdown()
        lines = file.read_text().splitlines()
        check_lines(lines[seen:], linked, child_id)
        seen = len(lines)


def check_lines(lines: list[str], linked: SpanContext, child_id: int) -> None:
    requests = [json.loads(line) for line in lines]
    assert len(requests) == 2  # One export request a line; none for that without spans.
    spans = {
        span["name"]: span
        for request in requests
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    trace_id, parent_id = f"{linked.trace_id:032x}", f"{linked.span_id:016x}"
    assert spans["prefill"]["traceId"] == spans["turn"]["traceId"] == trace_id
    assert spans["prefill"]["spanId"] == f"{child_id:016x}"
    assert spans["prefill"]["parentSpanId"] == parent_id
    assert "parentSpanId" not in spans["turn"]
    assert spans["prefill"]["links"][0]["spanId"] == parent_id
    assert spans["turn"]["kind"] == SpanKind.SERVER.value + 1  # OTLP counts from UNSPECIFIED = 0.
    attributes = {item["key"]: item["value"] for item in spans["turn"]["attributes"]}
    assert attributes["kvturn.reused_tokens"] == {"intValue": "7"}
    assert spans["turn"]["startTimeUnixNano"].isdecimal()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[HTTPConnection, Path]]:
    """The HTTP half alone: a connection to it, and its file."""
    path = tmp_path / "traces.jsonl"
    file = TraceFile(path)
    listener = TraceListener(file, "127.0.0.1", 0)
    listener.start()
    connection = HTTPConnection("127.0.0.1", listener.port, timeout=10)
    yield connection, path
    connection.close()
    listener.stop()
    file.close()


def status_of_export(connection: HTTPConnection) -> int:
    """Exports over a connection, and returns the answer's status."""
    connection.request("POST", "/v1/traces", SPANS.SerializeToString(), {"content-type": PROTOBUF})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "words"),
    [
        ("/v1/metrics", {"content-type": PROTOBUF}, b"", 404, "POST /v1/traces"),
        ("/", {}, b"", 404, "POST /v1/traces"),
        ("/v1/traces", {"content-type": "application/json"}, b"{}", 415, "http/protobuf"),
        ("/v1/traces", {"content-type": PROTOBUF}, b"\xff\xff", 400, "ExportTraceServiceRequest"),
        (
            "/v1/traces",
            {"content-type": PROTOBUF, "content-encoding": "gzip"},
            b"plain",
            400,
            "no gzip",
        ),
        (
            "/v1/traces",
            {"content-type": PROTOBUF, "content-encoding": "gzip"},
            gzip.compress(SPANS.SerializeToString(), mtime=0)[:-9],  # An id that all workers share.
            400,
            "cut",
        ),
        (
            "/v1/traces",
            {"content-type": PROTOBUF, "content-encoding": "zstd"},
            b"",
            415,
            "not zstd",
        ),
        (
            "/v1/traces",
            {"content-type": PROTOBUF, "content-length": str(65 << 20)},
            b"",
            413,
            "smaller batches",
        ),
        (
            "/v1/traces",
            {"content-type": PROTOBUF, "content-length": "9" * 5_000},
            b"",
            413,
            "smaller batches",
        ),
    ],
)
def test_who_is_refused_is_told_what_to_send(
    listener: tuple[HTTPConnection, Path],
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    words: str,
) -> None:
    """As Status to who sent protobuf, as JSON to others; nothing is written, others go on."""
    connection, file = listener
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    told = answer.read()
    assert answer.status == status
    assert answer.headers["content-type"] == headers.get("content-type", "application/json")
    message = (
        Status.FromString(told).message
        if headers.get("content-type") == PROTOBUF
        else json.loads(told)["message"]
    )
    assert words in message
    assert file.read_text() == ""
    assert status_of_export(connection) == 200
    assert len(file.read_text().splitlines()) == 1


def test_what_gzip_makes_large_is_refused(
    listener: tuple[HTTPConnection, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of what is unpacked, and no more is unpacked."""
    monkeypatch.setattr(otlp_http, "MESSAGE_BYTES_MAX", 1_000)
    connection, file = listener
    headers = {"content-type": PROTOBUF, "content-encoding": "gzip"}
    connection.request("POST", "/v1/traces", gzip.compress(b"x" * 2_000), headers)
    assert connection.getresponse().status == 413
    assert file.read_text() == ""


def test_a_question_that_is_no_post_and_a_body_without_length_are_refused(
    listener: tuple[HTTPConnection, Path],
) -> None:
    """GET says what there is; a body in chunks is asked for with its length."""
    connection, _ = listener
    connection.request("GET", "/v1/traces")
    answer = connection.getresponse()
    assert answer.status == 405
    assert b"POST /v1/traces" in answer.read()
    chunks = iter([SPANS.SerializeToString()])
    connection.request("POST", "/v1/traces", chunks, {"content-type": PROTOBUF})
    answer = connection.getresponse()
    assert answer.status == 411
    assert b"content-length" in answer.read()


def test_who_writes_on_after_a_refusal_reads_it(listener: tuple[HTTPConnection, Path]) -> None:
    """The client sends for longer than the answer takes; its connection does not break."""
    connection, _ = listener
    with socket.create_connection((connection.host, connection.port), 10) as client:
        client.sendall(
            b"POST /v1/traces HTTP/1.1\r\nhost: h\r\ncontent-type: application/x-protobuf\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        assert client.recv(12) == b"HTTP/1.1 411"  # It has refused, and the rest comes only now.
        for _ in range(100):
            client.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        told = b"".join(iter(lambda: client.recv(4096), b""))
        assert b"content-length" in told


def test_more_connections_than_there_may_be_are_closed(
    listener: tuple[HTTPConnection, Path],
) -> None:
    """Each has a thread of its own; as soon as one is free, the next is served."""
    first, _ = listener
    *held, extra = [HTTPConnection(first.host, first.port, timeout=10) for _ in range(17)]
    assert {status_of_export(one) for one in held} == {200}
    with pytest.raises((ConnectionError, HTTPException)):
        status_of_export(extra)
    for one in [*held, extra]:
        one.close()
    status = 0
    while not status:
        with contextlib.suppress(ConnectionError, HTTPException):
            status = status_of_export(first)
    assert status == 200


def test_a_connection_that_gets_no_thread_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without room for a thread, for a time: it is closed, and the next is served."""
    monkeypatch.setattr(otlp_http, "CONNECTIONS_MAX", 1)
    file = TraceFile(tmp_path / "traces.jsonl")
    listener = TraceListener(file, "127.0.0.1", 0)
    listener.start()
    connection = HTTPConnection("127.0.0.1", listener.port, timeout=10)
    with monkeypatch.context() as full:

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        full.setattr(threading.Thread, "start", start)
        with pytest.raises((ConnectionError, HTTPException)):
            status_of_export(connection)
    connection.close()
    assert status_of_export(connection) == 200
    connection.close()
    listener.stop()
    file.close()


def test_an_empty_request_is_an_empty_object() -> None:
    """A request without spans is legal."""
    assert to_otlp_json(trace_service_pb2.ExportTraceServiceRequest()) == {}


def test_a_full_trace_file_moves_aside(tmp_path: Path) -> None:
    """The file and the one before it stay below the limit each; every line is whole."""
    path = tmp_path / "deep" / "traces.jsonl"
    file = TraceFile(path, bytes_max=100)
    for number in range(30):
        file.write(b'{"n":%d}' % number)
    file.close()
    older = path.with_name("traces.jsonl.1")
    assert older.stat().st_size <= 100
    assert path.stat().st_size <= 100
    lines = (older.read_text() + path.read_text()).splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(30 - len(lines), 30))


def test_a_trace_file_that_cannot_move_aside_is_tried_again(tmp_path: Path) -> None:
    """Each export is refused until it can, and the file takes what comes then."""
    path = tmp_path / "traces.jsonl"
    file = TraceFile(path, bytes_max=150)
    file.take(SPANS)
    before = path.read_text()
    in_the_way = tmp_path / "traces.jsonl.1"
    in_the_way.mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            file.take(SPANS)
    in_the_way.rmdir()
    file.take(SPANS)
    assert (in_the_way.read_text(), path.read_text()) == (before, before)
    file.close()
    with pytest.raises(OSError, match="the receiver ends"):
        file.take(SPANS)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_traces_go_to_a_regular_file_alone(kind: str, tmp_path: Path) -> None:
    """A pipe that nobody reads would be waited for, and moved aside when it is full."""
    path = tmp_path / "traces"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(OSError, match="is no regular file"):
        TraceFile(path)


@pytest.mark.parametrize("fault", ["port", "http-port", "file"])
async def test_a_receiver_that_cannot_start_says_so_in_one_line(fault: str, tmp_path: Path) -> None:
    """Ports in use and a file that cannot be written: one line naming the flag, code 2."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    file = Path("/proc/none/traces.jsonl") if fault == "file" else tmp_path / "traces.jsonl"
    ports = {flag: str(taken if fault == flag else 0) for flag in ("port", "http-port")}
    arguments = ["--file", str(file), *(f"--{flag}={port}" for flag, port in ports.items())]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvturn_cli",
        "otlp",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    server.close()
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1
    assert f" --{fault}" in errors.decode()
