"""`kvturn doctor` against a router with stub engines, in order and broken in each way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from certificates import Authority
from kvturn_command import Done, kvturn_beside
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from router_harness import FakeLease, Rig, announcement, router
from stub_engine import CHAT, GUARD_S, Reply, Seen, StubEngine

from kvturn.otlp import GRPC, HTTP, PROTOCOLS
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.doctor.collector import findings as collector_findings
from kvturn_cli.doctor.command import main
from kvturn_cli.doctor.diagnosis import diagnose
from kvturn_cli.doctor.examination import Scope, examine
from kvturn_cli.doctor.facts import Facts, RouterFacts
from kvturn_cli.doctor.finding import Finding, Severity
from kvturn_cli.doctor.probes.certificates import Server, probe_certificates
from kvturn_cli.doctor.probes.collector import CollectorAccess, probe_collector
from kvturn_cli.doctor.probes.engines import cache_config, released, turned_off_by
from kvturn_cli.doctor.probes.host import efa_provider
from kvturn_cli.doctor.probes.http import Question, Unanswered, ask, date_clock
from kvturn_cli.doctor.probes.router import RouterAccess
from kvturn_cli.doctor.probes.turns import drive_turns, lengths, story
from kvturn_cli.otlp import TraceServicer
from kvturn_cli.otlp_http import TraceListener
from kvturn_cli.trace_file import TraceFile
from kvturn_connector.settings import machine, network

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

METRICS = """
# HELP kvturn_connector_retained_blocks Blocks of KV memory that are held for later turns.
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True"} 1.0
kvturn_connector_releases_total{engine="0",model_name="m",reason="pressure"} 3.0
kvturn_connector_releases_total{engine="0",model_name="m",reason="consumed"} 2.1e+01
kvturn_connector_releases_total{engine="1",model_name="m",reason="pressure"} 1.0
"""


@dataclass
class ToldLease(FakeLease):
    """A lease service that tells of itself, and whose conversations have a lease from turn 2 on."""

    described: dict[str, Any] = field(default_factory=dict)
    old: bool = False
    """Whether it is older than the methods that doctor asks for."""
    second_verdict: str = ""
    """Why the second turn finds nothing; "" if it finds its lease."""

    def answer_to(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
        again = [one.conversation for one in self.begun].count(begin.conversation) > 1
        self.lease_id = "i.1.1" if again and not self.second_verdict else ""
        self.verdict = self.second_verdict if again and self.second_verdict else "FIRST_TURN"
        return super().answer_to(begin)

    async def DescribeService(self, request: Any, context: Any) -> Any:
        if self.old:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown")
        routers = [
            lease_pb2.Router(router_id=one.router_id, version=one.version) for one in self.hellos
        ]
        told = lease_pb2.DescribeServiceResponse(
            **{"version": "0.1.0", "leads": True, "policy": "idle", "routers": routers}
            | self.described
        )
        told.times.session_ttl.FromSeconds(5)
        told.times.idle.FromSeconds(60)
        told.times.max_hold.FromSeconds(480)
        told.times.longest_read.FromSeconds(30)
        told.wall_time.GetCurrentTime()
        return told

    async def ListEngines(self, request: Any, context: Any) -> Any:
        return lease_pb2.ListEnginesResponse(engines=self.engines)

    async def ListConversations(self, request: Any, context: Any) -> Any:
        return lease_pb2.ListConversationsResponse()


def settings(**more: Any) -> lease_pb2.EngineSettings:
    """Returns how a stub engine says that it was started, on this machine."""
    told: dict[str, Any] = {
        "dtype": "bfloat16",
        "prefix_caching": True,
        "bidirectional_kv_xfer": True,
        "kv_load_failure_policy": "recompute",
        "kv_recompute_threshold": 64,
        "nixl_backends": ["UCX"],
        "machine": machine(),
        "network": network(),
        "plain_attention": True,
    }
    return lease_pb2.EngineSettings(**{**told, **more})


def introduce(rig: Rig, engine: StubEngine, port: int, **more: Any) -> lease_pb2.Engine:
    """Gives an engine a session and an HTTP API as vLLM's; returns what its session tells."""
    told = announcement(engine)
    told.description.vllm_version = "0.32.0"
    told.description.connector_version = "0.1.0"
    told.description.block_size = 16
    told.description.nixl.CopyFrom(
        common_pb2.NixlAddress(nixl_engine_id="n", host="127.0.0.1", port=port)
    )
    told.description.settings.CopyFrom(settings(**more))
    memory = lease_pb2.KvMemory(total_blocks=100, free_blocks=80, retained_blocks=20)
    told.memory.CopyFrom(memory)
    rig.lease.engines.append(told)

    async def version(seen: Seen, reply: Reply) -> None:
        await reply.json({"version": "0.32.0"})

    async def metrics(seen: Seen, reply: Reply) -> None:
        await reply.whole(METRICS.encode())

    engine.script("/version", version)
    engine.script("/metrics", metrics)
    return told


@contextlib.asynccontextmanager
async def deployment(*flags: str, **more: Any) -> AsyncIterator[Rig]:
    """Runs a deployment in order: router, lease service, two engines with a session."""
    async with router(*flags, lease=ToldLease(), **more) as rig:
        side_channel = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = side_channel.sockets[0].getsockname()[1]
        for engine in (rig.prefill, rig.decode):
            introduce(rig, engine, port)
        await rig.lease.push(engines=rig.lease.engines)
        rig.prefill.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 40}
        try:
            yield rig
        finally:
            side_channel.close()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub engines grant nothing that a second turn had to wait for."""
    monkeypatch.setattr("kvturn_cli.doctor.probes.turns.PAUSE_S", 0.0)


async def examined(rig: Rig, **scope: Any) -> list[Finding]:
    """Returns doctor's findings."""
    told: list[str] = []
    facts = await examine(Scope(RouterAccess(rig.url), timeout_s=5.0, **scope), told.append)
    assert told[0].startswith("asking the router")
    return list(diagnose(facts))


def amiss(findings: list[Finding]) -> dict[str, Severity]:
    """Returns what is not in order, by check."""
    return {one.check: one.severity for one in findings if one.severity != Severity.OK}


async def test_a_healthy_deployment_is_in_order_and_its_second_turn_reuses() -> None:
    """All that the router names is asked; nothing else need be given."""
    async with deployment("--plan=pull") as rig:
        findings = await examined(rig)
        ended = list(rig.lease.ended)
        bodies = [seen.json for seen in rig.decode.turns]
    assert not amiss(findings)
    seen = {one.check: one.seen for one in findings}
    assert "40 of 48 prompt tokens read from decode" in seen["turns.reuse"]
    assert "reached from here" in seen["reach.side_channel"]
    assert "4 of 25 retentions given up for memory" in seen["memory.pressure"]
    assert "vLLM 0.32.0" in seen["versions.vllm"]
    assert len({one["messages"][0]["content"] for one in bodies}) == 1
    assert [len(one["messages"]) for one in bodies] == [1, 3]
    assert [one.conversation_id.startswith("kvturn-doctor-") for one in ended] == [True]


async def test_no_turns_are_driven_when_none_are_wanted() -> None:
    """`--no-turns`."""
    async with deployment() as rig:
        findings = await examined(rig, turns=False)
        assert not rig.decode.turns
    assert not amiss(findings)
    assert not [one for one in findings if one.group == "turns"]


async def test_why_the_second_turn_did_not_reuse_is_told() -> None:
    """By its verdict; and the conversation is ended all the same."""
    async with deployment("--plan=pull") as rig:
        rig.lease.second_verdict = "NO_LEASE"
        findings = await examined(rig)
        assert len(rig.lease.ended) == 1
    assert amiss(findings) == {"turns.reuse": Severity.PROBLEM}
    [finding] = [one for one in findings if one.check == "turns.reuse"]
    assert "no_lease" in finding.seen


async def test_a_turn_that_fails_is_told_in_the_routers_words() -> None:
    """What an engine answers goes through."""

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "the engine is out of sorts"}}, 500)

    async with deployment() as rig:
        rig.decode.script(CHAT, refuse)
        findings = await examined(rig)
    [finding] = [one for one in findings if one.check == "turns.served"]
    assert finding.severity == Severity.PROBLEM
    assert "HTTP 500: the engine is out of sorts" in finding.seen


async def test_usage_without_details_is_told() -> None:
    """Engines that were started without --enable-prompt-tokens-details."""
    async with deployment("--plan=pull") as rig:
        usage = rig.decode.usage
        rig.decode.usage = lambda: {**usage(), "prompt_tokens_details": None}  # type: ignore[method-assign]
        findings = await examined(rig)
    assert amiss(findings) == {"turns.usage": Severity.WARNING}


async def test_engines_without_a_session_are_told_by_what_their_metrics_show() -> None:
    """One has our connector without an endpoint, the other is stock."""
    async with deployment() as rig:
        rig.lease.engines.clear()
        rig.prefill.script("/metrics", _nothing)
        findings = await examined(rig, turns=False)
    found = [one for one in findings if one.check == "engines.session"]
    assert [one.severity for one in found] == [Severity.PROBLEM] * 2
    by_url = {one.seen.partition(" (")[0]: one.fix for one in found}
    assert "KvturnConnector" in by_url[rig.prefill.url]
    assert by_url[rig.decode.url].startswith("set kvturn_lease_endpoint")


async def test_an_engine_whose_connector_is_off_is_told_with_the_setting() -> None:
    """Without bidirectional_kv_xfer it opens no session; its metrics say why."""
    off = 'kvturn_connector_off{engine="0",setting="bidirectional_kv_xfer"} 1.0\n'

    async def metrics(seen: Seen, reply: Reply) -> None:
        await reply.whole((METRICS + off).encode())

    async with deployment() as rig:
        rig.lease.engines.pop(0)
        await rig.lease.push(engines=rig.lease.engines)
        rig.prefill.script("/metrics", metrics)
        findings = await examined(rig, turns=False)
    [finding] = [one for one in findings if one.check == "engines.session"]
    assert finding.seen == (
        f"{rig.prefill.url} (prefill): our connector is loaded and turned off:"
        " bidirectional_kv_xfer not set"
    )
    assert finding.fix == "set bidirectional_kv_xfer to true in its kv_connector_extra_config"


async def _nothing(seen: Seen, reply: Reply) -> None:
    await reply.whole(b"")


async def test_engines_that_differ_are_told() -> None:
    """As their sessions say."""
    async with deployment() as rig:
        rig.lease.engines.clear()
        introduce(rig, rig.prefill, 1, dtype="float16")
        introduce(rig, rig.decode, 1, nixl_backends=["LIBFABRIC"], prefix_caching=False)
        findings = await examined(rig, turns=False)
    found = amiss(findings)
    assert found["alike.dtype"] == found["transfer.backends"] == Severity.PROBLEM
    assert found["alike.prefix_caching"] == Severity.WARNING
    assert found["reach.side_channel"] == Severity.PROBLEM, "nobody listens on port 1"
    assert found["transfer.efa"] == Severity.PROBLEM


async def test_a_router_that_nobody_may_look_into_says_so(tmp_path: Path) -> None:
    """With keys, the client's for turns and the operator's for settings."""
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text("kvt-client-0123456789")
    operators.write_text("kvt-operator-0123456789")
    flags = (f"--api-keys-file={clients}", f"--admin-keys-file={operators}", "--plan=pull")
    async with deployment(*flags) as rig:
        findings = await examined(rig, lease=[rig.lease.address])
        assert amiss(findings).keys() == {"router.settings", "turns.reuse"}
        access = RouterAccess(rig.url, "kvt-client-0123456789", "kvt-operator-0123456789")
        facts = await examine(Scope(access), lambda _: None)
    assert not amiss(list(diagnose(facts)))


async def test_a_lease_service_that_does_not_lead_or_is_old_is_told() -> None:
    """What it cannot be asked is not judged."""
    async with deployment() as rig:
        rig.lease.described = {"leads": False, "refusal": "NOT_LEADER", "leader": "10.9.9.9:1"}
        findings = await examined(rig, turns=False)
        assert amiss(findings) == {"lease.leader": Severity.PROBLEM}
        rig.lease.described, rig.lease.old = {}, True
        findings = await examined(rig, turns=False)
        assert amiss(findings) == {"lease.version": Severity.WARNING}


async def test_without_a_router_the_rest_is_told_all_the_same() -> None:
    """The lease service and the engines that it knows."""
    async with deployment() as rig:
        access = RouterAccess("http://127.0.0.1:9")
        facts = await examine(Scope(access, lease=[rig.lease.address]), lambda _: None)
    findings = list(diagnose(facts))
    found = amiss(findings)
    assert found["router.reachable"] == Severity.PROBLEM
    assert len([one for one in findings if one.check == "versions.vllm"]) == 1


# --- Its parts ------------------------------------------------------------------------------------


def test_metrics_of_vllm_are_read() -> None:
    """Counters over all engines of a process, and how the cache is set up."""
    assert released(METRICS) == {"pressure": 4, "consumed": 21}
    config = cache_config(METRICS)
    assert (config.block_size, config.cache_dtype, config.prefix_caching) == ("16", "auto", True)
    assert cache_config("").prefix_caching is None


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        (((0, "kvturn_lease_endpoint"), (0, "bidirectional_kv_xfer")), []),
        (((0, "kvturn_lease_endpoint"), (1, "bidirectional_kv_xfer")), ["bidirectional_kv_xfer"]),
        ((), None),
    ],
)
def test_a_connectors_metrics_tell_what_turns_it_off(
    told: tuple[tuple[int, str], ...], missing: list[str] | None
) -> None:
    """One that is older tells nothing."""
    lines = [
        f'kvturn_connector_off{{engine="0",model_name="m",setting="{setting}"}} {value}.0'
        for value, setting in told
    ]
    assert turned_off_by("\n".join([METRICS, *lines, ""])) == missing


def test_what_is_no_number_is_not_counted() -> None:
    """Whatever answers there may say anything."""
    for text in ("1.2.3", "..", "1e+999", "9" * 400):
        page = f'kvturn_connector_releases_total{{reason="idle"}} {text}\n'
        assert released(page) == {}


def test_a_date_header_tells_a_clock_to_a_few_seconds() -> None:
    """It counts whole seconds, and is up to two seconds older than the question."""
    clock = date_clock("x", "Mon, 30 Nov 2026 08:00:00 GMT", 1796025599.5, 1796025600.5)
    assert clock is not None
    assert (clock.low_s, clock.high_s) == (-0.5, 3.5)
    assert date_clock("x", "yesterday", 0, 0) is None


def test_no_two_stories_are_the_same_and_all_are_long_enough() -> None:
    """Names of things, and a number that is drawn anew."""
    one, other = story(1_000), story(1_000)
    assert one != other
    assert 1_000 <= len(one.split()) <= 1_020


async def test_the_length_of_a_turn_fits_threshold_and_context() -> None:
    """Twice the threshold, and no more than a quarter of the context."""
    async with deployment("--pull-min-tokens=600") as rig:
        facts = await examine(Scope(RouterAccess(rig.url), turns=False), lambda _: None)
        assert lengths(facts) == (1_200, 648)
        for one in rig.lease.engines:
            one.description.settings.max_model_len = 1024
        facts = await examine(Scope(RouterAccess(rig.url), turns=False), lambda _: None)
        assert lengths(facts) == (256, 256)


async def test_a_conversation_is_ended_when_doctor_is_interrupted() -> None:
    """In the middle of its first turn."""
    silence = asyncio.Event()

    async def hang(seen: Seen, reply: Reply) -> None:
        await silence.wait()

    async with deployment() as rig:
        rig.decode.script(CHAT, hang)
        access = RouterAccess(rig.url)
        driving = asyncio.create_task(drive_turns(access, "m", (400, 64), 60.0))
        await rig.decode.turn()
        driving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driving
        assert len(rig.lease.ended) == 1
        silence.set()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ncontent-le"])
async def test_what_is_no_http_server_is_told_within_the_deadline(answer: bytes) -> None:
    """It closes, speaks something else, or falls silent in the middle."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if not answer:
            writer.close()
        await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(GUARD_S):
        with pytest.raises(Unanswered):
            await ask(Question(f"http://127.0.0.1:{port}/", timeout_s=0.3))
    server.close()


async def test_an_answer_that_comes_drop_by_drop_has_the_same_deadline() -> None:
    """Each header line arrives in time, and the head never ends."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not gone.is_set():
            writer.write(b"x: y\r\n")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), 0.05)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(GUARD_S):
        with pytest.raises(Unanswered, match=r"no answer within 0\.2 s"):
            await ask(Question(f"http://127.0.0.1:{port}/", timeout_s=0.2))
    gone.set()
    server.close()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[1]",
        b"5",
        b"[" * 100_000,
        b'{"lease": 5, "engines": 7, "data": 5, "reason": 5}',
        b'{"lease": ["h:1"], "stock_ttl_s": "x", "engines": [5], "data": [null]}',
        b'{"engines": [{"role": "prefill"}, {"url": 5}], "data": [{"id": 7}]}',
    ],
)
async def test_a_server_that_is_no_router_is_reported_as_such(body: bytes) -> None:
    """Whatever it answers: no settings, no engines, and turns that fail in words."""
    engine = await StubEngine("decode").start()

    async def other(seen: Seen, reply: Reply) -> None:
        await reply.whole(body)

    for path in ("/ready", "/kvturn/v1/settings", "/kvturn/v1/engines", "/v1/models", CHAT):
        engine.script(path, other)
    access = RouterAccess(engine.url)
    facts = await examine(Scope(access, lease=("127.0.0.1:1",), timeout_s=2.0), lambda _: None)
    await engine.stop()
    found = {one.check: one for one in diagnose(facts)}
    assert "no settings of a kvturn router" in found["router.settings"].seen
    assert facts.router.engines is None
    if facts.turns is None:
        assert facts.turns_skipped
    else:
        assert all(turn.problem for turn in facts.turns)


async def test_why_tls_does_not_come_about_is_told(tmp_path: Path) -> None:
    """No authority, no TLS on one side or the other; and a good answer."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    trusting = ssl.create_default_context(cafile=authority.ca)
    flags = (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")

    async def health(port: int, scheme: str, tls: ssl.SSLContext | None = None) -> str:
        url = f"{scheme}://127.0.0.1:{port}/health"
        try:
            return str((await ask(Question(url, timeout_s=GUARD_S, tls=tls))).status)
        except Unanswered as problem:
            return str(problem)

    async with router(*flags, ready=False) as secure, router() as plain:
        assert await health(secure.server.port, "https", trusting) == "200"
        assert "its certificate is not trusted" in await health(secure.server.port, "https")
        assert "give https://" in await health(secure.server.port, "http")
        assert (
            await health(plain.server.port, "https", trusting) == "it speaks no TLS; give http://"
        )


@contextlib.asynccontextmanager
async def receiver(protocol: str, path: Path) -> AsyncIterator[str]:
    """Receives traces in one protocol; yields its URL."""
    file = TraceFile(path)
    if protocol == GRPC:
        server = grpc.aio.server()
        add_servicer = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_servicer(TraceServicer(file), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"http://127.0.0.1:{port}"
        await server.stop(None)
    else:
        listener = TraceListener(file, "127.0.0.1", 0)
        listener.start()
        yield f"http://127.0.0.1:{listener.port}"
        listener.stop()
    file.close()


@pytest.mark.parametrize("configured", PROTOCOLS)
@pytest.mark.parametrize("spoken", PROTOCOLS)
async def test_a_collector_is_asked_in_the_routers_protocol_then_in_the_other(
    configured: str, spoken: str, tmp_path: Path
) -> None:
    """Which one answered is told, and the flag that puts it right; nothing is written for it."""
    file = tmp_path / "traces.jsonl"
    async with receiver(spoken, file) as url:
        flags = (f"--otlp-endpoint={url}", f"--otlp-protocol={configured}")
        async with deployment(*flags) as rig:
            findings = await examined(rig, turns=False)
    (finding,) = [one for one in findings if one.check == "traces.collector"]
    assert f"in {spoken}" in finding.seen
    if spoken == configured:
        assert finding.severity == Severity.OK
    else:
        assert finding.severity == Severity.WARNING
        assert f"not in {configured}" in finding.seen
        assert f"--otlp-protocol {spoken} on routers" in finding.fix
    assert file.read_text() == ""


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_collector_is_told_what_opentelemetrys_variables_say(protocol: str) -> None:
    """Its headers: without them it refuses us, which has a fix of its own."""
    if protocol == GRPC:

        class Wary(trace_service_pb2_grpc.TraceServiceServicer):
            async def Export(self, request: Any, context: Any) -> Any:
                if ("x-key", "open sesame") not in context.invocation_metadata():
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")
                return trace_service_pb2.ExportTraceServiceResponse()

        server = grpc.aio.server()
        add_servicer = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_servicer(Wary(), server)  # type: ignore[no-untyped-call]
        url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    else:
        collector = await StubEngine("decode").start()
        url = collector.url

        async def take(seen: Seen, reply: Reply) -> None:
            await reply.json({}, 200 if seen.header("x-key") == "open sesame" else 401)

        collector.script("/v1/traces", take)
    variables = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=open%20sesame"}
    known = await probe_collector(url, protocol, "--otlp", 3.0, CollectorAccess(variables))
    strange = await probe_collector(url, protocol, "--otlp", 3.0, CollectorAccess({}))
    await (server.stop(None) if protocol == GRPC else collector.stop())
    assert (known.problem, known.protocol) == ("", protocol)
    assert strange.refused
    [finding] = collector_findings(Facts(RouterFacts(""), collector=strange))
    assert "refuses us" in finding.seen
    assert "OTEL_EXPORTER_OTLP_HEADERS" in finding.fix


async def test_certificates_are_looked_at_before_they_end(tmp_path: Path) -> None:
    """One that is valid for a day yet, and one that is not valid any more."""
    authority = Authority(tmp_path)
    tls = ssl.create_default_context(cafile=authority.ca)

    async def left_s(valid_days: tuple[int, int]) -> float:
        pair = authority.issue(valid_days=valid_days)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.cert, pair.key)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        [seen] = await probe_certificates([Server("it", "127.0.0.1", port, tls)], GUARD_S)
        server.close()
        return seen.left_s

    assert 80_000 < await left_s((-1, 1)) <= 86_400
    assert await left_s((-2, -1)) == 0.0
    assert not await probe_certificates([Server("gone", "127.0.0.1", 1, tls)], GUARD_S)


async def test_a_collector_that_no_router_names_is_asked_in_what_it_is_meant_for() -> None:
    """gRPC as a rule, HTTP by its path; of one that is gone it is told why."""
    collector = await StubEngine("decode").start()

    async def take(seen: Seen, reply: Reply) -> None:
        await reply.json({})

    collector.script("/v1/traces", take)
    access = CollectorAccess({})
    by_path = await probe_collector(f"{collector.url}/v1/traces", "", "--otlp", 3.0, access)
    wrong = await probe_collector(collector.url, "", "--otlp", 3.0, access)
    await collector.stop()
    gone = await probe_collector(collector.url, "", "--otlp", 3.0, access)
    assert (by_path.problem, by_path.protocol, by_path.wanted) == ("", HTTP, HTTP)
    assert (wrong.problem, wrong.protocol, wrong.wanted) == ("", HTTP, GRPC)
    assert "UNAVAILABLE" in gone.problem


async def test_libfabric_is_asked_for_its_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fi_info -p efa` lists it, knows none, hangs, or is not there."""
    program = tmp_path / "fi_info"
    monkeypatch.setenv("PATH", str(tmp_path))

    async def says(script: str) -> tuple[bool | None, str]:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return await efa_provider(2.0)

    assert (await efa_provider(2.0))[0] is None
    assert await says('echo "provider: efa"') == (True, "")
    none = await says('echo "fi_getinfo: -61 (No data available)"; exit 61')
    assert none == (False, "fi_info -p efa: fi_getinfo: -61 (No data available)")
    program.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    hung, why = await efa_provider(0.2)
    assert hung is None
    assert "0.2 s" in why


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--router", "10.0.0.2:8000"], "--router: '10.0.0.2:8000' is no http://HOST:PORT"),
        (["--router", "http://h:99999"], "--router"),
        (["--lease", "nowhere"], "--lease: 'nowhere' must be HOST:PORT"),
        (["--etcd", "a:1,b"], "--etcd: 'a:1,b' must be HOST:PORT"),
        (["--etcd-cert", "c", "--etcd-key", "k"], "--etcd-cert needs --etcd-ca"),
        (["--etcd-user", "u"], "--etcd-user and --etcd-password-file go together"),
        (["--etcd-ca", "/nowhere"], "--etcd-ca /nowhere: cannot be read"),
        (["--ca", "/nowhere"], "--ca /nowhere: cannot be read"),
        (["--lease-token-file", "/nowhere"], "--lease-token-file"),
        (["--otlp", "ftp://h:1"], "--otlp"),
        (["--timeout", "0"], "--timeout"),
        (["--no-turn"], "--no-turns"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, nothing asked."""
    try:
        code = main(flags)
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert words in error
    assert error.count("\n") == 1


async def test_the_command_prints_a_report_or_json_and_exits_by_it() -> None:
    """0 without problems, 1 with one."""
    async with deployment("--plan=pull") as rig:
        code, text, _ = await doctor("--router", rig.url)
        assert code == 0, text
        assert text.splitlines()[-1].startswith("0 problems, 0 warnings, ")
        rig.lease.second_verdict = "RELEASED"
        code, text, error = await doctor("--router", rig.url, "--json")
        assert code == 1, error
        told = json.loads(text)
    assert told["summary"]["problem"] == 1
    assert [one["verdict"] for one in told["turns"]] == ["first_turn", "released"]


async def test_nothing_there_is_told_quickly() -> None:
    """No router, no lease service."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, text, error = await doctor("--router", nobody)
    assert (code, error) == (1, "")
    assert "PROBLEM http://127.0.0.1" in text


async def doctor(*flags: str) -> Done:
    """Runs the command in a process of its own."""
    return await kvturn_beside("doctor", "--run-dir", "/nowhere", *flags)
