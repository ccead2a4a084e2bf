"""Who may call the lease service: tokens, certificates, roles, and engines bound to their ids."""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from certificates import Authority, Pair
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from router_harness import router, turn_body
from router_process import process
from tcp_proxy import TcpProxy

from kvturn.clock import boottime_ns
from kvturn.lease_access import LeaseAccess, lease_access
from kvturn.lease_channels import LeaseChannels, Unanswered
from kvturn.tls import TlsFiles
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn.watched import FileFault
from kvturn_connector.config import ConfigError as ConnectorConfigError
from kvturn_connector.config import ConnectorConfig
from kvturn_connector.lease_client import LeaseClient
from kvturn_connector.retention import Retentions
from kvturn_connector.session import EngineSession
from kvturn_lease.__main__ import callers_of
from kvturn_lease.callers import ALLOWED, Role
from kvturn_lease.config import ConfigError, parse_config
from kvturn_lease.lessor import Lessor
from kvturn_lease.server import LeaseServer
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

GUARD_S = 120
KEY = common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def tokens(tmp_path: Path) -> list[str]:
    """Flags with a file of tokens per role: TOKEN-ROLE, and for engines one that is bound."""
    texts = {
        "engine": "token-engine\ntoken-bound decode-*\n",
        "router": "token-router\n",
        "operator": "token-operator alice\n",
    }
    for role, text in texts.items():
        (tmp_path / role).write_text(text)
        (tmp_path / role).chmod(0o600)
    return [f"--{role}-tokens-file={tmp_path / role}" for role in texts]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@asynccontextmanager
async def lease_service(*flags: str) -> AsyncIterator[str]:
    """A lease service with these flags; its HOST:PORT."""
    config = parse_config(["--port=0", *flags], {})
    callers, tracing = callers_of(config), make_tracing(None)
    servicer = LeaseServicer(
        config, Lessor(config.lessor, 7), MemoryStore(), boottime_ns, tracing, callers
    )
    server = LeaseServer(config, servicer, tracing, callers)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


def tls_files(ca: Path | None, pair: Pair | None = None) -> TlsFiles:
    return TlsFiles(pair and pair.cert, pair and pair.key, ca, ("cert", "key", "ca"))


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def dial(address: str, access: LeaseAccess | None = None) -> AsyncIterator[Any]:
    channel = (access or LeaseAccess()).channel(address, [("grpc.use_local_subchannel_pool", 1)])
    async with channel:
        yield lease_pb2_grpc.LeaseServiceStub(channel)


def register(engine_id: str) -> lease_pb2.EngineSessionRequest:
    engine = lease_pb2.EngineDescription(
        engine_id=engine_id, incarnation=f"inc-{engine_id}", role=common_pb2.ENGINE_ROLE_PREFILL
    )
    return lease_pb2.EngineSessionRequest(
        session_number=1, sequence=1, register=lease_pb2.RegisterEngine(engine=engine)
    )


async def call(stub: Any, method: str, token: str | None = None) -> tuple[Any, str]:
    """Calls a method; returns code and reason of how that was refused, (OK, "") if it was not.

    What a method itself refuses counts as not refused: the caller was let in.
    """
    carried = metadata(token)
    try:
        if method in ("EngineSession", "RouterSession"):
            stream = getattr(stub, method)(metadata=carried)
            first = (
                register("decode-1")
                if method == "EngineSession"
                else lease_pb2.RouterSessionRequest(hello=lease_pb2.RouterHello(router_id="r"))
            )
            await stream.write(first)
            await stream.done_writing()
            async with asyncio.timeout(GUARD_S):
                await stream.read()
            stream.cancel()
        else:
            name = "LeaseService"
            described = lease_pb2.DESCRIPTOR.services_by_name[name].methods_by_name[method]
            request = getattr(lease_pb2, described.input_type.name)()
            await getattr(stub, method)(request, metadata=carried, timeout=GUARD_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in (UNAUTHENTICATED, PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE):
            return error.code(), reason_of(error)
    return grpc.StatusCode.OK, ""


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return ""
    return str(info.reason)


async def until_let_in(attempt: Callable[[], Awaitable[tuple[Any, str]]]) -> None:
    """Calls again until the caller is known; the lease service looks at its files now and then."""
    async with asyncio.timeout(GUARD_S):
        while True:
            code, _ = await attempt()
            if code is not UNAUTHENTICATED:
                assert code is grpc.StatusCode.OK
                return
            await asyncio.sleep(0.05)


def test_each_method_is_somebodys() -> None:
    """A method that is added is nobody's but operators' until it is listed."""
    methods = lease_pb2.DESCRIPTOR.services_by_name["LeaseService"].methods_by_name
    assert set(ALLOWED) == set(methods)


async def test_each_role_may_call_its_own_methods_and_no_others(tokens: list[str]) -> None:
    """By tokens; one that is not known, or none at all, opens nothing."""
    async with lease_service(*tokens) as address, dial(address) as stub:
        for method, allowed in ALLOWED.items():
            for role in Role:
                expected = (
                    (grpc.StatusCode.OK, "")
                    if role in allowed
                    else (PERMISSION_DENIED, "ROLE_REFUSED")
                )
                assert await call(stub, method, f"token-{role}") == expected, (method, role)
            for token in (None, "token-nobody", "", "token-engin\u00e9".encode().hex()):
                assert await call(stub, method, token) == (UNAUTHENTICATED, "CALLER_UNKNOWN")


async def test_health_is_open_to_all(tokens: list[str]) -> None:
    """Probes tell who leads and nothing else."""
    async with (
        lease_service(*tokens) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="kvturn.v1.LeaseService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_an_engine_cannot_register_under_an_id_that_is_not_its_own(
    tokens: list[str],
) -> None:
    """A token that names a pattern is good for those ids alone; nothing is registered else."""
    async with lease_service(*tokens) as address, dial(address) as stub:
        for engine_id, welcome in (("decode-9", True), ("prefill-1", False)):
            stream = stub.EngineSession(metadata=metadata("token-bound"))
            await stream.write(register(engine_id))
            async with asyncio.timeout(GUARD_S):
                if welcome:
                    assert (await stream.read()).HasField("registered")
                    engines = await stub.ListEngines(
                        lease_pb2.ListEnginesRequest(), metadata=metadata("token-operator")
                    )
                    assert [one.description.engine_id for one in engines.engines] == ["decode-9"]
                    stream.cancel()
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stream.read()
                    assert refused.value.code() is PERMISSION_DENIED
                    assert reason_of(refused.value) == "ENGINE_ID_REFUSED"


@pytest.mark.parametrize("name", ["d\n2026-01-01 ERROR all is lost", "d\r", "d\x1b[2J", "d\u2028"])
async def test_no_name_writes_lines_of_its_own_into_logs(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Engine ids, addresses and router ids are shown: control characters in them are refused."""
    caplog.set_level(logging.DEBUG)
    async with lease_service() as address, dial(address) as stub:
        named, addressed = register(name), register("d")
        addressed.register.engine.http_address = f"http://{name}"
        hello = lease_pb2.RouterSessionRequest(hello=lease_pb2.RouterHello(router_id=name))
        for method, first in (
            ("EngineSession", named),
            ("EngineSession", addressed),
            ("RouterSession", hello),
        ):
            stream = getattr(stub, method)()
            await stream.write(first)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with asyncio.timeout(GUARD_S):
                    await stream.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert name not in caplog.text


async def test_tokens_are_read_again_when_their_file_changes(
    tokens: list[str], tmp_path: Path
) -> None:
    """A new token counts and an old one does not, a second later, without a restart."""
    async with lease_service(*tokens) as address, dial(address) as stub:
        assert await call(stub, "TouchConversation", "token-router") == (grpc.StatusCode.OK, "")
        (tmp_path / "router").write_text("token-newer\n")
        await until_let_in(lambda: call(stub, "TouchConversation", "token-newer"))
        assert (await call(stub, "TouchConversation", "token-router"))[0] is UNAUTHENTICATED


async def test_without_any_setting_it_is_open_and_says_so_beyond_loopback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On loopback there is nothing to say."""
    async with lease_service() as address, dial(address) as stub:
        for method in ALLOWED:
            assert (await call(stub, method))[0] is grpc.StatusCode.OK
    assert not caplog.records
    assert callers_of(parse_config(["--host=0.0.0.0"], {})) is None
    [record] = caplog.records
    assert "--engine-tokens-file" in record.getMessage()


def test_tokens_that_travel_unencrypted_are_warned_of(
    tokens: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond loopback whoever listens in on the network has them."""
    assert callers_of(parse_config(tokens, {})) is not None
    assert not caplog.records
    assert callers_of(parse_config([*tokens, "--host=0.0.0.0"], {})) is not None
    [record] = caplog.records
    assert "unencrypted" in record.getMessage()


# --- certificates ---------------------------------------------------------------------------------


def mtls(ours: Authority) -> list[str]:
    pair = ours.issue()
    return [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={ours.ca}"]


async def test_with_authorities_alone_a_certificate_of_theirs_is_enough(
    ours: Authority, tmp_path: Path
) -> None:
    """One that names no role has all; none, a stranger's and an expired one are not let in."""
    stranger = Authority(tmp_path, "stranger").issue()
    async with lease_service(*mtls(ours)) as address:
        async with dial(address, lease_access(tls_files(ours.ca, ours.issue()))) as stub:
            for method in ("TouchConversation", "BeginRead", "RevokeLease", "EngineSession"):
                assert (await call(stub, method))[0] is grpc.StatusCode.OK
        for bad in (None, stranger, ours.issue(valid_days=(-2, -1))):
            async with dial(address, lease_access(tls_files(ours.ca, bad))) as stub:
                assert (await call(stub, "ListEngines"))[0] is grpc.StatusCode.UNAVAILABLE
        async with dial(address) as stub:
            assert (await call(stub, "ListEngines"))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_may_name_its_role_and_its_engine(ours: Authority) -> None:
    """Then it is good for these alone."""
    cases = [
        ("kvturn:router", "TouchConversation", (grpc.StatusCode.OK, "")),
        ("kvturn:router", "EngineSession", (PERMISSION_DENIED, "ROLE_REFUSED")),
        ("kvturn:engine/decode-1", "EngineSession", (grpc.StatusCode.OK, "")),
        ("kvturn:engine/decode-*", "EngineSession", (grpc.StatusCode.OK, "")),
        ("kvturn:engine/decode-2", "EngineSession", (PERMISSION_DENIED, "ENGINE_ID_REFUSED")),
        ("kvturn:engine", "RevokeLease", (PERMISSION_DENIED, "ROLE_REFUSED")),
        ("kvturn:operator", "RevokeLease", (grpc.StatusCode.OK, "")),
        ("kvturn:nobody", "ListEngines", (UNAUTHENTICATED, "CALLER_UNKNOWN")),
    ]
    async with lease_service(*mtls(ours)) as address:
        for name, method, expected in cases:
            access = lease_access(tls_files(ours.ca, ours.issue(uris=[name])))
            async with dial(address, access) as stub:
                assert await call(stub, method) == expected, (name, method)


async def test_with_tokens_a_certificate_without_a_role_needs_one(
    ours: Authority, tokens: list[str]
) -> None:
    """Then the certificate only opens the door."""
    access = lease_access(tls_files(ours.ca, ours.issue()))
    async with (
        lease_service(*mtls(ours), *tokens) as address,
        dial(address, access) as stub,
    ):
        assert (await call(stub, "ListEngines"))[0] is UNAUTHENTICATED
        assert (await call(stub, "ListEngines", "token-router"))[0] is grpc.StatusCode.OK


async def test_a_client_does_not_believe_a_lease_service_with_a_wrong_certificate(
    ours: Authority, tmp_path: Path
) -> None:
    """So no token goes to one who only says that it is the lease service."""
    stranger = Authority(tmp_path, "stranger").issue()
    elsewhere = ours.issue(dns=["elsewhere"], addresses=["10.9.9.9"])
    for pair in (stranger, elsewhere, ours.issue(valid_days=(-2, -1))):
        async with (
            lease_service(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}") as address,
            dial(address, lease_access(tls_files(ours.ca))) as stub,
        ):
            assert (await call(stub, "ListEngines"))[0] is grpc.StatusCode.UNAVAILABLE


async def test_channels_take_up_a_new_token(tokens: list[str], tmp_path: Path) -> None:
    """With the next question, on a connection that there is."""
    token = tmp_path / "token"
    token.write_text("token-nobody")
    async with lease_service(*tokens) as address:
        access = lease_access(tls_files(None), token, "token-file")
        channels = LeaseChannels([address], boottime_ns, access)

        async def ask() -> tuple[Any, str]:
            question = lease_pb2.ListEnginesRequest()
            try:
                await channels.ask(lambda stub: stub.ListEngines, question, timeout_s=GUARD_S)
            except grpc.aio.AioRpcError as error:
                return error.code(), ""
            return grpc.StatusCode.OK, ""

        assert (await ask())[0] is UNAUTHENTICATED
        token.write_text("token-router\n")
        await until_let_in(ask)
        await channels.close()


async def test_a_lease_service_with_new_certificates_is_found_again(
    ours: Authority, tmp_path: Path
) -> None:
    """Channels that have lost it connect with the authorities that their file holds then."""
    others = Authority(tmp_path, "others")
    ca = tmp_path / "lease.pem"
    shutil.copy(ours.ca, ca)
    old, new = ours.issue(), others.issue()
    question = lease_pb2.ListEnginesRequest()
    async with lease_service(f"--tls-cert={old.cert}", f"--tls-key={old.key}") as address:
        channels = LeaseChannels([address], boottime_ns, lease_access(tls_files(ca)))
        watch = asyncio.create_task(channels.run())
        await channels.ask(lambda stub: stub.ListEngines, question, timeout_s=GUARD_S)
    shutil.copy(others.ca, ca)
    flags = [f"--port={address.rpartition(':')[2]}"]
    flags += [f"--tls-cert={new.cert}", f"--tls-key={new.key}"]
    async with lease_service(*flags), asyncio.timeout(GUARD_S):
        while True:
            try:
                await channels.ask(lambda stub: stub.ListEngines, question, timeout_s=GUARD_S)
                break
            except Unanswered:
                await asyncio.sleep(0.05)
        watch.cancel()
        await channels.close()


# --- those who call -------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110 - other threads cannot set an asyncio.Event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def connector(address: str, **extra: str) -> AsyncIterator[LeaseClient]:
    """The thread that runs in an engine."""
    engine = lease_pb2.EngineDescription(
        engine_id="decode-1", incarnation="inc", role=common_pb2.ENGINE_ROLE_PREFILL
    )
    session = EngineSession(engine, Retentions("inc", 100, 10**12), lease_pb2.KvMemory)
    config = ConnectorConfig.from_extra(
        {"kvturn_lease_endpoint": address, "bidirectional_kv_xfer": True} | extra
    )
    client = LeaseClient(config, "decode-1", session)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.shutdown)


async def test_an_engine_with_certificate_and_token_holds_a_session(
    ours: Authority, tokens: list[str], tmp_path: Path
) -> None:
    """The connector's own client, over mTLS."""
    token = tmp_path / "token"
    token.write_text("token-bound\n")
    pair = ours.issue()
    files = {
        "kvturn_lease_ca": str(ours.ca),
        "kvturn_lease_cert": str(pair.cert),
        "kvturn_lease_key": str(pair.key),
        "kvturn_lease_token_file": str(token),
    }
    async with (
        lease_service(*mtls(ours), *tokens) as address,
        connector(address, **files) as client,
    ):
        await until(lambda: client.registered)


async def test_an_engine_without_a_token_says_so_once(
    tokens: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It pauses rather than asks again and again, and nothing is retained meanwhile."""
    async with lease_service(*tokens) as address, connector(address) as client:
        await until(lambda: "UNAUTHENTICATED" in caplog.text)
        assert not client.registered
    said = [r.getMessage() for r in caplog.records if r.name == "vllm.kvturn"]
    assert len(said) == 1
    assert "recompute" in said[0]


@pytest.mark.parametrize("theirs", ["plain", "tls"])
async def test_an_engine_whose_tls_does_not_fit_says_so_once(
    theirs: str, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """With the key of its own settings, and no more often than that."""
    pair = ours.issue()
    flags = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"] if theirs == "tls" else []
    extra = {} if theirs == "tls" else {"kvturn_lease_ca": str(ours.ca)}
    reason = {
        "plain": "it speaks no TLS: leave kvturn_lease_ca out, or set --tls-cert",
        "tls": "it closes connections at once: if it has --tls-cert, set kvturn_lease_ca;",
    }[theirs]
    async with (
        lease_service(*flags) as behind,
        TcpProxy("127.0.0.1", int(behind.rpartition(":")[2])) as proxy,
        connector(address := f"127.0.0.1:{proxy.port}", **extra) as client,
    ):
        await until(lambda: "no session" in caplog.text)
        attempts = proxy.connections
        await until(lambda: proxy.connections > attempts + 3)
        assert not client.registered
    said = [r.getMessage() for r in caplog.records if r.name == "vllm.kvturn"]
    assert len(said) == 1
    assert f"no session with the lease service at {address}: {reason}" in said[0]


async def test_a_router_without_a_token_serves_without_reuse(
    tokens: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Turns go on; one line says why nothing is reused."""
    caplog.set_level(logging.INFO)
    async with lease_service(*tokens) as address, router(f"--lease={address}") as rig:
        for _ in range(3):
            answer = await rig.post(turn_body(conversation_id="c"))
            assert answer.status == 200
            assert answer.verdict == "lease_service_unreachable"
        said = [r.name for r in caplog.records if "(UNAUTHENTICATED)" in r.getMessage()]
        assert said
        assert len(said) == len(set(said)), "each part that asks says it once"


async def test_each_refused_caller_is_told_once_at_the_lease_service(
    tokens: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Routers that try again and again do not hide one another; names write no lines."""
    async with lease_service(*tokens) as address, dial(address) as stub:
        for name in ("one", "two", "one", "two", "x\ny"):
            hello = lease_pb2.RouterSessionRequest(hello=lease_pb2.RouterHello(router_id=name))
            stream = stub.RouterSession(metadata=metadata("token-engine"))
            await stream.write(hello)
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
        for number in range(50):
            stream = stub.EngineSession()
            await stream.write(register(f"engine-{number}"))
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
    said = [r.getMessage() for r in caplog.records if r.name == "kvturn.lease"]
    for name, line in zip(("'one'", "'two'", r"'x\ny'"), said, strict=False):
        assert f"calls itself {name}," in line
        assert "RouterSession" in line
        assert "not that of router" in line
    assert len(said) == 16


async def test_a_router_says_which_token_is_refused(
    tokens: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the token of another role; asked for by hand the answer says so, too."""
    token = tmp_path / "token"
    token.write_text("token-engine\n")
    flags = [f"--lease-token-file={token}"]
    async with lease_service(*tokens) as address, router(f"--lease={address}", *flags) as rig:
        await until(lambda: "--lease-token-file" in caplog.text)
        ended = await rig.ask("DELETE", "/kvturn/v1/conversations/c?model=m")
    said = [r.getMessage() for r in caplog.records if r.name == "kvturn.router.session"]
    refusal = (
        "it refuses us (PERMISSION_DENIED): the caller's token or certificate is not that of router"
    )
    assert len(said) == 1
    assert said[0].startswith(f"no session with the lease service at {address}: {refusal}; check ")
    assert ended.status == 503
    assert "check --lease-token-file" in ended.json["error"]["message"]


@pytest.mark.parametrize(
    ("theirs", "router_flags", "reason"),
    [
        ("tls", "", "it closes connections at once: if it has --tls-cert, set --lease-ca;"),
        ("plain", "--lease-ca", "it speaks no TLS: leave --lease-ca out, or set --tls-cert and"),
        ("strange", "--lease-ca", "its certificate is not to be trusted by --lease-ca: "),
        ("elsewhere", "--lease-ca", "its certificate does not name the address at which we call"),
        ("mtls", "--lease-ca", "it closes TLS connections at once: if it has --tls-client-ca, it"),
    ],
)
async def test_tls_that_does_not_fit_is_one_line_with_the_reason(
    theirs: str, router_flags: str, reason: str, ours: Authority, tmp_path: Path
) -> None:
    """As operators see it: all that a router writes while it cannot reach its lease service."""
    strangers = Authority(tmp_path, "strangers")
    pair = {
        "plain": None,
        "strange": strangers.issue(),
        "elsewhere": ours.issue(dns=["elsewhere"], addresses=["10.0.0.9"]),
    }.get(theirs, ours.issue())
    flags = [] if pair is None else [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
    if theirs == "mtls":
        flags.append(f"--tls-client-ca={ours.ca}")
    ca = [f"{router_flags}={ours.ca}"] if router_flags else []
    async with (
        lease_service(*flags) as address,
        process("--port=0", "--no-grpc", f"--lease={address}", *ca) as started,
    ):
        await started.until_listening()
        started.process.terminate()
        _, errors = await started.end()
    said = [line for line in errors.splitlines() if "draining" not in line]
    assert len(said) == 1, errors
    assert f"no session with the lease service at {address}: {reason}" in said[0]
    assert said[0].endswith("turns recompute until there is one")


async def test_a_router_with_a_token_asks_the_lease_service(
    tokens: list[str], tmp_path: Path
) -> None:
    """A first turn, known as one."""
    token = tmp_path / "token"
    token.write_text("token-router\n")
    flags = ["--question-deadline-ms=5000", f"--lease-token-file={token}"]
    async with lease_service(*tokens) as address, router(f"--lease={address}", *flags) as rig:
        await rig.until_session()
        answer = await rig.post(turn_body(conversation_id="c"))
        assert answer.verdict == "first_turn"


# --- settings -------------------------------------------------------------------------------------


def test_wrong_settings_are_refused_by_name_in_one_line(
    ours: Authority, tokens: list[str], tmp_path: Path
) -> None:
    """At start, with the fix."""
    pair, other = ours.issue(), ours.issue()
    empty = tmp_path / "empty"
    empty.write_text("# none\n")
    cases = [
        (tokens[:1], "--engine-tokens-file and --router-tokens-file go together"),
        ([f"--router-tokens-file={empty}"], "--router-tokens-file .*: holds no key"),
        ([f"--engine-tokens-file={tmp_path / 'none'}"], "--engine-tokens-file .*: cannot be read"),
        ([f"--tls-cert={pair.cert}"], "--tls-cert needs --tls-key"),
        ([f"--tls-cert={pair.cert}", f"--tls-key={other.key}"], "--tls-key .*: is not the key"),
        ([f"--tls-client-ca={ours.ca}"], "--tls-client-ca needs --tls-cert"),
    ]
    for flags, said in cases:
        with pytest.raises(ConfigError, match=said) as refused:
            parse_config(flags, {})
        assert "\n" not in str(refused.value)


def test_wrong_keys_of_the_connector_are_refused_by_name(ours: Authority) -> None:
    """As the engine starts."""
    pair = ours.issue()
    for extra, said in (
        ({"kvturn_lease_ca": "/does/not/exist"}, "kvturn_lease_ca /does.*: cannot be read"),
        ({"kvturn_lease_cert": str(pair.cert)}, "kvturn_lease_cert needs kvturn_lease_ca"),
        ({"kvturn_lease_token_file": "/"}, "kvturn_lease_token_file /: cannot be read"),
    ):
        with pytest.raises(ConnectorConfigError, match=said):
            ConnectorConfig.from_extra(extra)


def test_access_without_settings_is_plain(ours: Authority) -> None:
    """And a certificate without authorities is refused: TLS would not be on."""
    assert lease_access(tls_files(None)).metadata == ()
    with pytest.raises(FileFault, match="cert needs ca"):
        lease_access(tls_files(None, ours.issue()))
