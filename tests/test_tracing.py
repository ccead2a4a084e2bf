"""Where spans go, which turns are traced, and that a collector holds nobody up."""

import contextlib
import gzip
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import grpc
import pytest
from awake import ends_within
from certificates import Authority
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from recorded_spans import Recording, told

from kvturn import otlp_export, span_export
from kvturn.otlp import GRPC, HTTP, PROTOCOLS, Destination, WrongSetting, destination_of
from kvturn.span_export import CALM_S, SpanQueue
from kvturn.span_wire import SERVER
from kvturn.trace_context import trace_context
from kvturn.tracing import Tracing
from kvturn_connector import telemetry as connector
from kvturn_lease import telemetry as lease
from kvturn_router.telemetry import turn_trace as router
from kvturn_router.telemetry.sampling import Sampler, sampler_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTLP = "OTEL_EXPORTER_OTLP"
ATTRIBUTES = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
PROCESSES: Mapping[str, Callable[[Destination], Tracing]] = {
    "router": router.make_tracing,
    "lease": lease.make_tracing,
    "connector": lambda destination: connector.make_tracing(destination, "engine-0"),
}


# --- destinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "variables", "destination"),
    [
        (("", ""), {}, None),
        (("", HTTP), {}, None),
        (("http://c:4317", ""), {}, ("http://c:4317", GRPC)),
        (("http://c:4318", HTTP), {}, ("http://c:4318/v1/traces", HTTP)),
        (("http://c:4318/v1/traces", HTTP), {}, ("http://c:4318/v1/traces", HTTP)),
        (("https://c/otlp/", HTTP), {}, ("https://c/otlp/v1/traces", HTTP)),
        (
            ("", ""),
            {"ENDPOINT": "http://c:4318", "PROTOCOL": HTTP},
            ("http://c:4318/v1/traces", HTTP),
        ),
        (("http://a:1", GRPC), {"ENDPOINT": "http://c:2", "PROTOCOL": HTTP}, ("http://a:1", GRPC)),
        (
            ("", ""),
            {
                "ENDPOINT": "http://c:1",
                "TRACES_ENDPOINT": "http://c:2/own",
                "PROTOCOL": GRPC,
                "TRACES_PROTOCOL": HTTP,
            },
            ("http://c:2/own", HTTP),
        ),
    ],
)
def test_flags_come_first_then_the_standards_variables(
    given: tuple[str, str], variables: dict[str, str], destination: tuple[str, str] | None
) -> None:
    """Of http the path is added, but to a variable that is about traces alone."""
    environment = {f"{OTLP}_{name}": value for name, value in variables.items()}
    assert destination_of(*given, environment) == destination
    assert destination_of(*given, {**environment, "OTEL_SDK_DISABLED": "true"}) is None


@pytest.mark.parametrize(
    ("given", "variables", "named"),
    [
        (("collector:4317", ""), {}, "--otlp-endpoint"),
        (("http://c:1", "http/json"), {}, "--otlp-protocol"),
        (
            ("http://c:1", ""),
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http"},
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
        (("", ""), {f"{OTLP}_ENDPOINT": "c:1"}, f"{OTLP}_ENDPOINT"),
        (("http://c:1", ""), {f"{OTLP}_COMPRESSION": "zstd"}, f"{OTLP}_COMPRESSION"),
        (("http://c:1", ""), {ATTRIBUTES: "zz"}, ATTRIBUTES),
        (("http://c:1", ""), {ATTRIBUTES: "-1"}, ATTRIBUTES),
    ],
)
def test_a_wrong_destination_is_refused_by_name(
    given: tuple[str, str], variables: dict[str, str], named: str
) -> None:
    """The flag or the variable that is at fault, with what it must be."""
    with pytest.raises(WrongSetting) as refused:
        destination_of(*given, variables)
    assert str(refused.value).startswith(f"{named} must be ")


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_a_ratio_chooses_the_traces_that_the_sdk_would_choose(ratio: float) -> None:
    """So a client, or another service, with the same ratio records the same traces."""
    own, other = sampler_of(ratio, {}), TraceIdRatioBased(ratio)
    for number in range(2_000):
        trace_id = number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
        sampled = other.should_sample(None, trace_id, "turn").decision.is_sampled()
        assert own.samples(trace_id, None) is sampled


@pytest.mark.parametrize(
    ("name", "argument", "decisions"),
    [
        ("", "", (True, True, False)),
        ("always_on", "", (True, True, True)),
        ("always_off", "", (False, False, False)),
        ("traceidratio", "0", (False, False, False)),
        ("parentbased_always_on", "", (True, True, False)),
        ("parentbased_always_off", "", (False, True, False)),
        ("parentbased_traceidratio", "0", (False, True, False)),
        ("parentbased_traceidratio", "", (True, True, False)),
    ],
)
def test_samplers_go_by_the_standards_names(
    name: str, argument: str, decisions: tuple[bool, bool, bool]
) -> None:
    """Without a client's trace, under one that is recorded, under one that is not."""
    sampler = sampler_of(None, {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert tuple(sampler.samples(7, client) for client in (None, True, False)) == decisions


@pytest.mark.parametrize(
    ("name", "argument", "named"),
    [
        ("jaeger_remote", "", "OTEL_TRACES_SAMPLER"),
        ("traceidratio", "1.5", "OTEL_TRACES_SAMPLER_ARG"),
        ("traceidratio", "x", "OTEL_TRACES_SAMPLER_ARG"),
        ("traceidratio", "nan", "OTEL_TRACES_SAMPLER_ARG"),
    ],
)
def test_a_wrong_sampler_is_refused_by_name(name: str, argument: str, named: str) -> None:
    variables = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    with pytest.raises(WrongSetting) as refused:
        sampler_of(None, variables)
    assert str(refused.value).startswith(f"{named} must be ")


def test_a_turn_that_is_not_sampled_is_recorded_nowhere() -> None:
    """What goes on to the engines says so, and the others follow it."""
    recording = Recording()
    turns = router.TurnTracer(recording.tracing.tracer, Sampler(bound=0))
    turn = turns.begin(None)
    assert not turn.recorded
    context = trace_context(turn.traceparent)
    assert context is not None
    assert not context.sampled
    assert not recording.tracing.span(context.traceparent, "begin_read", SERVER).recorded
    recording.tracing.flush()
    assert recording.exported == []


# --- collectors -----------------------------------------------------------------------------------


@pytest.fixture
def blackhole() -> Iterator[int]:
    """A port where connections are accepted and never served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def time_of_span(tracing: Tracing) -> float:
    """Returns how long, in seconds, whoever makes a span is held up by it."""
    began_s = time.perf_counter()
    tracing.span(TRACEPARENT, "turn", SERVER).end({"a": 1})
    return time.perf_counter() - began_s


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("silent", [False, True])
def test_a_collector_that_does_not_answer_costs_one_line(
    process: str,
    protocol: str,
    silent: bool,
    blackhole: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Down or a black hole: spans go nowhere, nobody waits, and the end comes on time."""
    monkeypatch.setattr(otlp_export, "EXPORT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(span_export, "_DELAY_S", 0.01)
    port = blackhole if silent else 1
    destination = destination_of(f"http://127.0.0.1:{port}", protocol, {})
    assert destination is not None
    tracing = PROCESSES[process](destination)
    told_of = threading.Event()
    monkeypatch.setattr(logging.getLogger("kvturn"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        control = Recording().tracing
        for _ in range(3):
            before = len(caplog.records)
            took = [[time_of_span(each) for each in (tracing, control)] for _ in range(101)]
            dead_s, control_s = map(median, zip(*took, strict=True))
            assert dead_s < 10 * control_s  # A wait for the collector is a thousand times that.
            tracing.flush()
            told_of.wait(0.02 if before == 0 else 0)
        assert ends_within(span_export.SHUTDOWN_TIMEOUT_S + 1, tracing.shutdown)
    lines = [each for each in caplog.records if "spans" in each.message]
    assert [each.message.partition(" (")[0] for each in lines] == ["spans cannot be delivered"]
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


Taken = tuple[str, Mapping[str, str], bytes]


class Collector:
    """Takes exports over HTTP or gRPC, once it has given the refusals that it is told to give."""

    def __init__(self) -> None:
        self.refusals: list[int] = []
        """Statuses of HTTP; over gRPC their like."""
        self.taken: list[Taken] = []
        """Of each export the path, the headers by lower-case name, and the request unpacked."""
        self.url = ""

    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(request) for _, _, request in self.taken]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Requests(ThreadingHTTPServer):
    """The HTTP of a collector."""

    def __init__(self, collector: Collector) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.collector = collector
        collector.url = f"http://127.0.0.1:{self.server_port}"


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Requests)
        collector = self.server.collector
        headers = {name.lower(): value for name, value in self.headers.items()}
        if collector.refusals:
            self.send_response(status := collector.refusals.pop(0))
            if status == 302:
                self.send_header("location", f"{collector.url}/elsewhere")
        else:
            body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
            collector.taken.append((self.path, headers, body))
            self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


_CODES = {
    302: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def grpc_server(collector: Collector) -> grpc.Server:
    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        if collector.refusals:
            context.abort(_CODES[collector.refusals.pop(0)], "not now")
        headers = {str(key): str(value) for key, value in context.invocation_metadata()}
        collector.taken.append((PATHS[GRPC], headers, request))
        return b""

    service, _, method = PATHS[GRPC][1:].rpartition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    return server


PATHS = {
    GRPC: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    HTTP: "/v1/traces",
}


@contextlib.contextmanager
def serving(collector: Collector, tls: ssl.SSLContext | None = None) -> Iterator[None]:
    """Serves it over HTTP, or HTTPS."""
    with Requests(collector) as requests:
        if tls is not None:
            requests.socket = tls.wrap_socket(requests.socket, server_side=True)
        thread = threading.Thread(target=requests.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        requests.shutdown()
        thread.join()


@pytest.fixture
def collector(protocol: str) -> Iterator[Collector]:
    """A collector that speaks the test's protocol."""
    collector = Collector()
    if protocol == GRPC:
        server = grpc_server(collector)
        server.start()
        yield collector
        server.stop(None).wait()
        return
    with serving(collector):
        yield collector


def tracing_to(url: str, protocol: str, process: str = "router") -> Tracing:
    destination = destination_of(url, protocol, {})
    assert destination is not None
    return PROCESSES[process](destination)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("process", PROCESSES)
def test_spans_go_with_what_the_variables_say(
    process: str, protocol: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, headers, compression, and whose they are."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-who=me%20too")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    if process != "router":
        monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    tracing = tracing_to(collector.url, protocol, process)
    tracing.span(TRACEPARENT, "turn", SERVER).end({"a": 1})
    tracing.shutdown(10)
    ((path, headers, body),) = collector.taken
    assert path == PATHS[protocol]
    assert headers["x-who"] == "me too"
    if protocol == HTTP:
        assert headers["content-type"] == "application/x-protobuf"
        assert headers["content-encoding"] == "gzip"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == ("named" if process == "lease" else f"kvturn-{process}")
    assert named["deployment.environment.name"] == "lab"
    if process == "connector":
        assert named["service.instance.id"] == "engine-0"
    (span,) = resource.scope_spans[0].spans
    assert told(span) == {"a": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_need_no_exporter_of_the_library(protocol: str, collector: Collector) -> None:
    """vLLM's environment may bring any version of them, or none."""
    program = f"""
import sys
for protocol in ("grpc", "http"):
    sys.modules[f"opentelemetry.exporter.otlp.proto.{{protocol}}"] = None
from test_tracing import SERVER, TRACEPARENT, tracing_to
tracing = tracing_to({collector.url!r}, {protocol!r}, "connector")
tracing.span(TRACEPARENT, "turn", SERVER).end()
tracing.flush()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent)
    assert [span.name for span in collector.spans()] == ["turn"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_has_no_room_is_asked_again(
    protocol: str,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice it refuses for now, the third time it takes the same spans: nothing is lost."""
    monkeypatch.setattr(otlp_export, "_PAUSE_S", 0.001)
    collector.refusals = [429, 503]
    tracing = tracing_to(collector.url, protocol)
    assert tracing.queue is not None
    tracing.span(TRACEPARENT, "turn", SERVER).end()
    with caplog.at_level(logging.WARNING):
        tracing.flush()
        tracing.shutdown()
    assert [span.name for span in collector.spans()] == ["turn"]
    assert (tracing.queue.sent, tracing.queue.dropped) == (1, 0)
    assert not caplog.records


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("refusal", [302, 401])
def test_what_a_collector_refuses_for_good_is_dropped(
    refusal: int, protocol: str, collector: Collector
) -> None:
    """At once; what comes after that is asked anew."""
    collector.refusals = [refusal]
    tracing = tracing_to(collector.url, protocol)
    assert tracing.queue is not None
    for name in ("refused", "taken"):
        tracing.span(TRACEPARENT, name, SERVER).end()
        tracing.flush()
    tracing.shutdown()
    assert [span.name for span in collector.spans()] == ["taken"]
    assert (tracing.queue.sent, tracing.queue.dropped) == (1, 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wrong_file_of_tls_is_told_by_its_variable(
    protocol: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spans are lost until it is there, and the line says which."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(logging.getLogger("kvturn"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        tracing = tracing_to("https://127.0.0.1:1", protocol)
        tracing.span(TRACEPARENT, "turn", SERVER).end()
        tracing.flush()
        tracing.shutdown()
    (line,) = [each.message for each in caplog.records]
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in line


@pytest.mark.parametrize("believed", [True, False])
def test_spans_go_over_https_to_a_collector_that_is_believed(
    believed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who it is, and who we are, as OpenTelemetry's variables say."""
    ours, strangers = Authority(tmp_path, "ours"), Authority(tmp_path, "strangers")
    pair, own = ours.issue(), ours.issue()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ours.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pair.cert, pair.key)
    collector = Collector()
    monkeypatch.setenv(f"{OTLP}_CERTIFICATE", str((ours if believed else strangers).ca))
    monkeypatch.setenv(f"{OTLP}_CLIENT_CERTIFICATE", str(own.cert))
    monkeypatch.setenv(f"{OTLP}_CLIENT_KEY", str(own.key))
    monkeypatch.setattr(otlp_export, "EXPORT_TIMEOUT_S", 10 if believed else 0.5)
    with serving(collector, context):
        tracing = tracing_to(collector.url.replace("http:", "https:"), HTTP)
        tracing.span(TRACEPARENT, "turn", SERVER).end()
        tracing.flush()
        tracing.shutdown()
    assert [span.name for span in collector.spans()] == (["turn"] if believed else [])


# --- losses ---------------------------------------------------------------------------------------


class Exporter:
    """Takes spans while it `works`, once it `goes`; `asked` is set with each export."""

    def __init__(self) -> None:
        self.works = True
        self.asked = threading.Event()
        self.goes = threading.Event()
        self.goes.set()

    def export(self, spans: object) -> bool:
        del spans
        self.asked.set()
        return self.goes.wait(60) and self.works

    def shutdown(self) -> None:
        return


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged, without the reasons."""
    return [each.message.partition(" (")[0] for each in caplog.records]


def test_spans_that_a_slow_collector_has_no_room_for_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes all that it gets: what did not fit meanwhile is lost, and one line says so."""
    exporter = Exporter()
    exporter.goes.clear()
    spans = SpanQueue(exporter, logging.getLogger("test.slow"), queue_max=100)
    with caplog.at_level(logging.WARNING):
        spans.put(b"s")
        assert exporter.asked.wait(60)
        for _ in range(2_000):
            spans.put(b"s")
        exporter.goes.set()
        spans.shutdown(60)
    assert (spans.sent, spans.dropped) == (101, 1_900)
    assert lines_of(caplog) == ["spans cannot be delivered"]


def test_a_collector_that_comes_and_goes_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    """One line as it begins, one once all was delivered for a minute; then the next is news."""
    exporter, now_s = Exporter(), 0.0
    spans = SpanQueue(exporter, logging.getLogger("test.flapping"), clock_s=lambda: now_s)

    def export(works: bool) -> None:
        exporter.works = works
        spans.put(b"s")
        spans.flush()

    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            export(False)
            now_s += CALM_S - 1
            export(True)
        assert lines_of(caplog) == ["spans cannot be delivered"]
        now_s += 1
        export(True)
        assert lines_of(caplog)[1:] == ["spans are delivered again"]
        export(False)
        assert lines_of(caplog)[2:] == ["spans cannot be delivered"]
        spans.shutdown(60)
    assert (spans.sent, spans.dropped) == (21, 21)


def test_one_request_is_never_longer_than_collectors_take() -> None:
    """Spans of 64 KiB: as many as fit, and all of them in the end."""
    sizes: list[int] = []

    class Measuring:
        def export(self, spans: object) -> bool:
            assert isinstance(spans, list)
            sizes.append(sum(map(len, spans)))
            return True

        def shutdown(self) -> None:
            return

    tracing = Tracing(Measuring(), logging.getLogger("kvturn.test"))
    for _ in range(100):
        tracing.span(TRACEPARENT, "turn", SERVER).end({"a": "x" * (1 << 16)})
    tracing.flush()
    tracing.shutdown()
    assert sum(sizes) > 100 << 16
    assert max(sizes) <= span_export.BATCH_BYTES_MAX


def test_nothing_is_said_of_a_collector_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """It hangs when the process ends: one line says so, and what waits for it is let go."""
    asked, let_go = threading.Event(), threading.Event()

    class Hanging:
        def export(self, spans: object) -> bool:
            del spans
            asked.set()
            return not let_go.wait(60)

        def shutdown(self) -> None:
            assert not let_go.is_set()
            let_go.set()

    threads = set(threading.enumerate())
    tracing = Tracing(Hanging(), logging.getLogger("test.hanging"))
    (exporting,) = set(threading.enumerate()) - threads
    tracing.span(TRACEPARENT, "turn", SERVER).end()
    assert asked.wait(60)
    with caplog.at_level(logging.WARNING):
        tracing.shutdown(0.01)
        exporting.join(60)
    assert not exporting.is_alive()
    assert [each.message.partition(" (")[0] for each in caplog.records] == [
        "spans cannot be delivered"
    ]
