"""The trace receiver: what a real exporter sends ends in the file as OTLP/JSON."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import insecure_channel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanKind

from kvturn_cli.otlp import TraceFile, to_otlp_json
from kvturn_cli.ports import pick_free


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Runs `kvturn otlp`; gives its endpoint and its file."""
    port = pick_free(set())
    file = tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "kvturn_cli", "otlp", "--port", str(port), "--file", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "receiving" in process.stdout.readline()
    yield f"http://127.0.0.1:{port}", file
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    process.stdout.close()


def test_a_real_exporter_s_spans_end_in_the_file(receiver: tuple[str, Path]) -> None:
    """Two spans, one the child of the other with a link: ids in hex, kinds as numbers."""
    endpoint, file = receiver
    provider = TracerProvider(resource=Resource.create({"service.name": "kvturn-router"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with insecure_channel(endpoint.removeprefix("http://")) as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=5)  # As kvturn doctor.
    with tracer.start_as_current_span("turn", kind=SpanKind.SERVER) as parent:
        parent.set_attribute("kvturn.reused_tokens", 7)
        linked = parent.get_span_context()
        with tracer.start_as_current_span("prefill", links=[Link(linked)]) as child:
            child_id = child.get_span_context().span_id
    provider.shutdown()

    requests = [json.loads(line) for line in file.read_text().splitlines()]
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


@pytest.mark.parametrize("fault", ["port", "file"])
async def test_a_receiver_that_cannot_start_says_so_in_one_line(fault: str, tmp_path: Path) -> None:
    """A port in use and a file that cannot be written: one line naming the flag, code 2."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    file = tmp_path / "traces.jsonl" if fault == "port" else Path("/proc/none/traces.jsonl")
    port = taken if fault == "port" else 0
    arguments = ["--port", str(port), "--file", str(file)]
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
    assert f"--{fault}" in errors.decode()
