"""Where spans go, which turns are traced, and that a collector holds nobody up."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from awake import ends_within
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from recorded_spans import Recording, told

from kvturn import otlp_export, span_export
from kvturn.otlp import GRPC, HTTP, PROTOCOLS, Destination, WrongSetting, destination_of
from kvturn.span_wire import SERVER
from kvturn.trace_context import trace_context
from kvturn.tracing import Tracing
from kvturn_connector import telemetry as connector
from kvturn_lease import telemetry as lease
from kvturn_router.telemetry import turn_trace as router
from kvturn_router.telemetry.sampling import Sampler, sampler_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTLP = "OTEL_EXPORTER_OTLP"
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
        for _ in range(3):
            before = len(caplog.records)
            took = []
            for _ in range(100):
                began = time.monotonic()
                tracing.span(TRACEPARENT, "turn", SERVER).end({"a": 1})
                took.append(time.monotonic() - began)
            assert sorted(took)[-2] < 0.5  # The machine may pause in one of them.
            tracing.flush()
            told_of.wait(0.02 if before == 0 else 0)
        assert ends_within(span_export.SHUTDOWN_TIMEOUT_S + 1, tracing.shutdown)
    lines = [each for each in caplog.records if "spans" in each.message]
    assert [each.message.partition(" (")[0] for each in lines] == ["spans cannot be delivered"]
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


class Requests(ThreadingHTTPServer):
    """A collector over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.taken: list[tuple[str, Mapping[str, str], ExportTraceServiceRequest]] = []


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Requests)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = ExportTraceServiceRequest.FromString(body)
        self.server.taken.append((self.path, headers, request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Requests]:
    with Requests() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("process", PROCESSES)
def test_spans_go_over_http_with_what_the_variables_say(
    process: str, collector: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, headers, and whose they are."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-who=me")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    if process != "router":
        monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    destination = destination_of(f"http://127.0.0.1:{collector.server_port}", HTTP, {})
    assert destination is not None
    tracing = PROCESSES[process](destination)
    tracing.span(TRACEPARENT, "turn", SERVER).end({"a": 1})
    tracing.shutdown(10)
    ((path, headers, request),) = collector.taken
    assert path == "/v1/traces"
    assert headers["x-who"] == "me"
    assert headers["content-type"] == "application/x-protobuf"
    (resource,) = request.resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == ("named" if process == "lease" else f"kvturn-{process}")
    assert named["deployment.environment.name"] == "lab"
    if process == "connector":
        assert named["service.instance.id"] == "engine-0"
    (span,) = resource.scope_spans[0].spans
    assert told(span) == {"a": 1}


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
