"""TLS on both sides of the router: who is let in, who is believed, and new files while it runs."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from certificates import Authority, Pair
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from recorded_spans import otlp_tracing, untraced
from router_harness import Answer, Client, Rig, router, turn_body
from stub_engine import GUARD_S, StubEngine

from kvturn.span_wire import SERVER
from kvturn.tls import ClientTls, ServerTls, TlsFiles, certificates_left_s
from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn_router.__main__ import compose
from kvturn_router.config import ConfigError, parse_config
from kvturn_router.engines.engine_http import ConnectFault, EnginePool, request_bytes

ENGINES = ("--prefill=http://p:1", "--decode=http://d:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def strangers(folder: Path) -> Authority:
    return Authority(folder, "strangers")


def context(ca: Path, pair: Pair | None = None) -> ssl.SSLContext:
    """Returns what a client trusts and shows."""
    made = ssl.create_default_context(cafile=ca)
    if pair is not None:
        made.load_cert_chain(pair.cert, pair.key)
    return made


def flags_of(pair: Pair, client_ca: Path | None = None) -> list[str]:
    flags = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
    return flags if client_ca is None else [*flags, f"--tls-client-ca={client_ca}"]


async def ask(rig: Rig, tls: ssl.SSLContext, host: str = "127.0.0.1") -> Answer:
    """Posts a turn over TLS."""
    async with asyncio.timeout(GUARD_S):
        connection = await asyncio.open_connection(
            "127.0.0.1", rig.server.port, ssl=tls, server_hostname=host
        )
    client = Client(*connection)
    try:
        await client.send("POST", "/v1/chat/completions", json.dumps(turn_body()).encode())
        return await client.answer()
    finally:
        client.close()


@asynccontextmanager
async def dial(
    rig: Rig, ca: Path, pair: Pair | None = None
) -> AsyncIterator[router_pb2_grpc.RouterServiceStub]:
    """A gRPC stub over TLS."""
    credentials = ClientTls(
        TlsFiles(pair and pair.cert, pair and pair.key, ca, ("cert", "key", "ca"))
    ).credentials()
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    target = f"127.0.0.1:{rig.server.grpc_port}"
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


def complete() -> router_pb2.CompleteRequest:
    return router_pb2.CompleteRequest(body_json=json.dumps(turn_body()))


async def until_decode_is_up(rig: Rig) -> None:
    await rig.until(lambda: any(seen.path == "/health" for seen in rig.decode.seen))
    await rig.until(lambda: any(seen.path == "/health" for seen in rig.prefill.seen))
    await asyncio.sleep(0)


async def until_believed(rig: Rig, tls: ssl.SSLContext) -> None:
    """Waits until the router shows a certificate that this client believes."""
    async with asyncio.timeout(GUARD_S):
        while True:
            try:
                await ask(rig, tls)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.05)
            else:
                return


# --- the router's listeners ---------------------------------------------------------------------


async def test_both_fronts_speak_tls(ours: Authority) -> None:
    """Clients that trust the authority are served, and name the host that they called."""
    async with router(*flags_of(ours.issue()), ready=False) as rig:
        await until_decode_is_up(rig)
        for host in ("127.0.0.1", "localhost"):
            assert (await ask(rig, context(ours.ca), host)).status == 200
        async with dial(rig, ours.ca) as stub:
            assert (await stub.Complete(complete(), timeout=GUARD_S)).body_json


@pytest.mark.parametrize("fault", ["stranger", "expired", "other host"])
async def test_a_client_does_not_believe_a_wrong_certificate(
    ours: Authority, strangers: Authority, fault: str
) -> None:
    """So no key and no prompt goes to one who only says that it is the router."""
    pair = {
        "stranger": lambda: strangers.issue(),
        "expired": lambda: ours.issue(valid_days=(-2, -1)),
        "other host": lambda: ours.issue(dns=["elsewhere"], addresses=["10.9.9.9"]),
    }[fault]()
    async with router(*flags_of(pair), ready=False) as rig:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(rig, context(ours.ca))
        async with dial(rig, ours.ca) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(complete(), timeout=GUARD_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_without_tls_learns_at_once_that_this_is_no_plain_port(
    ours: Authority,
) -> None:
    """Its connection ends; it does not hang, and the listener goes on."""
    async with router(*flags_of(ours.issue()), ready=False) as rig:
        await until_decode_is_up(rig)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n")
        async with asyncio.timeout(GUARD_S):
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        writer.close()
        assert not answer.startswith(b"HTTP")
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await router_pb2_grpc.RouterServiceStub(channel).Complete(complete(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await ask(rig, context(ours.ca))).status == 200


async def test_with_client_authorities_only_their_certificates_are_let_in(
    ours: Authority, strangers: Authority
) -> None:
    """mTLS: no certificate, a stranger's and an expired one end the connection on both fronts."""
    async with router(*flags_of(ours.issue(), ours.ca), ready=False) as rig:
        await until_decode_is_up(rig)
        good = ours.issue()
        assert (await ask(rig, context(ours.ca, good))).status == 200
        async with dial(rig, ours.ca, good) as stub:
            assert (await stub.Complete(complete(), timeout=GUARD_S)).body_json
        turns = len(rig.decode.turns)
        for bad in (None, strangers.issue(), ours.issue(valid_days=(-2, -1))):
            # With TLS 1.3 a client is through before the server has judged it.
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await ask(rig, context(ours.ca, bad))
            async with dial(rig, ours.ca, bad) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Complete(complete(), timeout=GUARD_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(rig.decode.turns) == turns


async def test_new_certificates_are_used_for_new_connections(
    folder: Path, ours: Authority, strangers: Authority
) -> None:
    """Certificate, key and client authorities change under a router that goes on serving."""
    pair = ours.issue()
    client_ca = folder / "clients.pem"
    shutil.copy(ours.ca, client_ca)
    async with router(*flags_of(pair, client_ca), ready=False) as rig:
        await until_decode_is_up(rig)
        old, new = ours.issue(), strangers.issue()
        assert (await ask(rig, context(ours.ca, old))).status == 200
        async with dial(rig, ours.ca, old) as stub:
            await stub.Complete(complete(), timeout=GUARD_S)
            strangers.issue(into=pair)
            shutil.copy(strangers.ca, client_ca)
            await until_believed(rig, context(strangers.ca, new))
            # What is connected stays so.
            await stub.Complete(complete(), timeout=GUARD_S)
        assert (await ask(rig, context(strangers.ca, new))).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(rig, context(ours.ca, old))
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(rig, context(strangers.ca, old))
        async with dial(rig, strangers.ca, new) as stub:
            await stub.Complete(complete(), timeout=GUARD_S)
        async with dial(rig, strangers.ca, old) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Complete(complete(), timeout=GUARD_S)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was warned of certificates."""
    return [each.message for each in caplog.records if each.name == "kvturn.tls"]


async def test_a_certificate_that_ends_is_warned_of_at_start_and_when_it_is_new(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each time, for both fronts; one that lasts is not spoken of."""
    pair = ours.issue(valid_days=(-1, 3))
    async with router(*flags_of(pair), ready=False) as rig:
        await until_decode_is_up(rig)
        (first,) = warned(caplog)
        assert first.startswith(f"--tls-cert {pair.cert}: its certificate ends in 3.0 days, and")
        ours.issue(valid_days=(-2, -1), into=pair)
        async with asyncio.timeout(GUARD_S):
            while len(warned(caplog)) == 1:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await ask(rig, context(ours.ca))
                await asyncio.sleep(0.05)
        _, second = warned(caplog)
        assert "its certificate has expired" in second
        ours.issue(valid_days=(-1, 30), into=pair)
        await until_believed(rig, context(ours.ca))
    assert len(warned(caplog)) == 2


def test_all_certificates_of_a_chain_count_and_what_is_none_does_not(ours: Authority) -> None:
    """With text around them; but where one is broken none is told of."""
    chain = ours.issue(valid_days=(-9, 20_000)).cert.read_bytes() + ours.ca.read_bytes()
    broken = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    left_s = certificates_left_s(b"text before\n" + chain, time.time())
    assert [round(each / 86_400) for each in left_s] == [20_000, 1]
    assert certificates_left_s(broken + chain, time.time()) == []


async def test_a_router_ends_with_the_certificates_that_it_serves_with(ours: Authority) -> None:
    """New files are broken when it is told to end: a connection that was made is served all the
    same."""
    pair = ours.issue()
    async with router(*flags_of(pair), "--grace-s=10", ready=False) as rig:
        await until_decode_is_up(rig)
        assert (await ask(rig, context(ours.ca))).status == 200
        pair.key.write_text("broken")
        made = socket.create_connection(("127.0.0.1", rig.server.port))  # behind the loop's back
        stopping = asyncio.create_task(rig.server.stop())
        streams = await asyncio.open_connection(
            sock=made, ssl=context(ours.ca), server_hostname="127.0.0.1"
        )
        client = Client(*streams)
        await client.send("POST", "/v1/chat/completions", json.dumps(turn_body()).encode())
        assert (await client.answer()).status == 200
        await stopping


# --- the router as a client of engines ----------------------------------------------------------


class TlsEngine(StubEngine):
    """An engine at an https:// address."""

    def __init__(self, role: str, pair: Pair, client_ca: Path | None = None) -> None:
        super().__init__(role)
        files = TlsFiles(pair.cert, pair.key, client_ca, ("cert", "key", "ca"))
        self._tls = ServerTls(files)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> "TlsEngine":
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, ssl=self._tls.context()
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self


@asynccontextmanager
async def engine(role: str, pair: Pair, client_ca: Path | None = None) -> AsyncIterator[TlsEngine]:
    running = await TlsEngine(role, pair, client_ca).start()
    try:
        yield running
    finally:
        await running.stop()


async def answer_in_plain_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As an HTTP server answers what is no HTTP."""
    assert not (await reader.read(1)).isalpha()
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()


async def test_engines_at_https_addresses_are_reached_over_tls(ours: Authority) -> None:
    """A turn goes through prefill and decode with a certificate of ours, streamed too."""
    pair = ours.issue()
    own = ours.issue()
    async with (
        engine("prefill", ours.issue(), ours.ca) as prefill,
        engine("decode", pair, ours.ca) as decode,
    ):
        flags = [
            f"--prefill={prefill.url}",
            f"--decode={decode.url}",
            f"--engine-ca={ours.ca}",
            f"--engine-cert={own.cert}",
            f"--engine-key={own.key}",
        ]
        config = parse_config([*flags, "--port=0", "--no-grpc", "--grace-s=0.2"], {})
        server = compose(config, untraced())
        await server.start()
        rig = Rig(server, [prefill], [decode], None)
        await rig.until_ready()
        for stream in (False, True):
            answer = await rig.post(turn_body(stream=stream))
            assert answer.status == 200
            assert b"Paris" in answer.body
        rig.close_clients()
        await server.stop()
        assert len(prefill.turns) == len(decode.turns) == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stranger", "self-signed certificate in certificate chain|unable to get local issuer"),
        ("expired", "expired"),
        ("other host", "IP address mismatch"),
        ("plain", "WRONG_VERSION_NUMBER|wrong version|record layer"),
    ],
)
async def test_no_request_goes_to_an_engine_that_is_not_the_one_meant(
    ours: Authority, strangers: Authority, fault: str, said: str
) -> None:
    """The fault says what is wrong; the engine has seen nothing of the request."""
    pair = {
        "stranger": lambda: strangers.issue(),
        "expired": lambda: ours.issue(valid_days=(-2, -1)),
        "other host": lambda: ours.issue(dns=["elsewhere"], addresses=["10.9.9.9"]),
        "plain": lambda: ours.issue(),
    }[fault]()
    async with engine("decode", pair) as listening:
        port = listening.port
        plain = await asyncio.start_server(answer_in_plain_words, "127.0.0.1", 0)
        if fault == "plain":
            port = plain.sockets[0].getsockname()[1]
        tls = context(ours.ca)
        pool = EnginePool("127.0.0.1", port, connect_timeout_s=GUARD_S, tls=lambda: tls)
        with pytest.raises(ConnectFault, match=said):
            await pool.send(request_bytes(b"GET", b"/health", []), silence_s=GUARD_S)
        pool.close()
        plain.close()
        assert not listening.seen


async def test_new_authorities_of_engines_count_for_new_connections(
    folder: Path, ours: Authority, strangers: Authority
) -> None:
    """An engine whose certificate comes of another authority is reached once its file is there."""
    ca = folder / "engines.pem"
    shutil.copy(ours.ca, ca)
    tls = ClientTls(TlsFiles(None, None, ca, ("cert", "key", "ca")))
    async with engine("decode", strangers.issue()) as listening:
        pool = EnginePool("127.0.0.1", listening.port, connect_timeout_s=GUARD_S, tls=tls.context)
        request = request_bytes(b"GET", b"/health", [(b"host", b"h")])
        with pytest.raises(ConnectFault):
            await pool.send(request, silence_s=GUARD_S)
        shutil.copy(strangers.ca, ca)
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    exchange = await pool.send(request, silence_s=GUARD_S)
                    break
                except ConnectFault:
                    await asyncio.sleep(0.05)
        await exchange.answered()
        assert exchange.status == 200
        pool.close()


# --- the collector of traces --------------------------------------------------------------------


class Collector(TraceServiceServicer):
    """Takes spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Export(  # type: ignore[override]
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        del context
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return ExportTraceServiceResponse()


@pytest.mark.parametrize("believed", [True, False])
async def test_traces_go_over_tls_to_a_collector_that_is_believed(
    ours: Authority, strangers: Authority, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An https:// endpoint; its authorities come as OpenTelemetry's own variable says."""
    pair = ours.issue()
    files = TlsFiles(pair.cert, pair.key, None, ("cert", "key", "ca"))
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_secure_port("127.0.0.1:0", ServerTls(files).credentials())
    await server.start()
    ca = ours.ca if believed else strangers.ca
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(ca))
    tracing = otlp_tracing(f"https://127.0.0.1:{port}")
    assert tracing.tracer is not None
    tracing.tracer.root("turn", SERVER, bytes(16)).end()
    await asyncio.to_thread(tracing.shutdown)
    await server.stop(None)
    assert collector.names == (["turn"] if believed else [])


# --- settings -----------------------------------------------------------------------------------


def test_wrong_tls_settings_are_refused_by_name_in_one_line(folder: Path, ours: Authority) -> None:
    """At start, with the fix; nothing is asked on the terminal."""
    pair, other = ours.issue(), ours.issue()
    empty = folder / "empty.pem"
    empty.write_text("")
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    cases = [
        ([f"--engine-ca={pipe}"], "--engine-ca .*pipe: is a pipe; give a file"),
        ([f"--engine-api-key-file={pipe}"], "--engine-api-key-file .*pipe: is a pipe"),
        ([f"--api-keys-file={pipe}"], "--api-keys-file .*pipe: is a pipe"),
        ([f"--tls-cert={pair.cert}"], "--tls-cert needs --tls-key"),
        ([f"--tls-key={pair.key}"], "--tls-client-ca needs --tls-cert|--tls-key needs --tls-cert"),
        ([f"--tls-client-ca={ours.ca}"], "--tls-client-ca needs --tls-cert"),
        (flags_of(Pair(pair.cert, other.key)), f"--tls-key {other.key}: is not the key"),
        (flags_of(Pair(empty, pair.key)), f"--tls-cert {empty}: is no PEM file"),
        (flags_of(Pair(folder / "none", pair.key)), "--tls-cert .*none: cannot be read: No such"),
        (flags_of(pair, empty), f"--tls-client-ca {empty}: holds no certificate"),
        ([f"--engine-cert={pair.cert}"], "--engine-cert needs --engine-key"),
        ([f"--engine-ca={folder}"], "--engine-ca .*: cannot be read: Is a directory"),
        (
            ["--lease=h:1", f"--lease-cert={pair.cert}", f"--lease-key={pair.key}"],
            "--lease-cert needs --lease-ca",
        ),
        (["--lease=h:1", f"--lease-token-file={empty}"], "--lease-token-file .*: must hold one"),
        ([f"--lease-token-file={empty}"], "--lease-token-file does nothing without --lease"),
    ]
    for flags, said in cases:
        with pytest.raises(ConfigError, match=said) as refused:
            parse_config([*ENGINES, *flags], {})
        assert "\n" not in str(refused.value)
