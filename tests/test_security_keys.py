"""API keys: who may call the router, as whom, and what of that goes further."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from recorded_spans import Recording
from router_harness import Client, FakeLease, router, turn_body
from stub_engine import CHAT

from kvturn.keys import parse_keys, unnamed, watched_keys
from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn.watched import LOOK_INTERVAL_S, FileFault, Watched, warn_of_open_secrets
from kvturn_router.config import ConfigError, parse_config
from kvturn_router.errors import TurnError
from kvturn_router.front import grpc_front
from kvturn_router.request.keys import ApiKeys, operator_of

ENGINES = ("--prefill=http://p:1", "--decode=http://d:1")
KEY = "kvt-0123456789abcdef"
OTHER = "kvt-fedcba9876543210"


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# clients\n\n{KEY} team-a  # the first\n{OTHER}\n")
    file.chmod(0o600)
    return file


def write(file: Path, text: str) -> None:
    """Writes a file as of a while ago."""
    file.write_text(text)
    os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))


class Time:
    """A clock that stands still until it is moved on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/kvturn/v1/conversations/c?model=m"),
        ("DELETE", "/kvturn/v1/conversations/c?model=m"),
    ],
)
async def test_without_a_known_key_nothing_is_served(
    keys_file: Path, method: str, path: str, authorization: str | None
) -> None:
    """401 in OpenAI's shape with a challenge; no engine sees anything of it."""
    headers = [] if authorization is None else [("authorization", authorization)]
    body = json.dumps(turn_body(prompt="x")).encode() if method == "POST" else None
    async with router(f"--api-keys-file={keys_file}") as rig:
        before = len(rig.decode.turns)
        answer = await rig.ask(method, path, body, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert KEY[:-1] not in answer.body.decode()
        assert len(rig.decode.turns) == before
        assert all(seen.path == "/health" for seen in rig.decode.seen)


async def test_health_and_readiness_need_no_key(keys_file: Path) -> None:
    """Those who watch the router are no clients."""
    async with router(f"--api-keys-file={keys_file}") as rig:
        assert (await rig.ask("GET", "/health")).status == 200
        assert (await rig.ask("GET", "/ready")).status == 200


async def test_the_body_of_a_client_without_a_key_is_not_waited_for(keys_file: Path) -> None:
    """The head is enough to refuse it: nobody without a key fills the router's memory."""
    async with router(f"--api-keys-file={keys_file}") as rig:
        client = Client(*await asyncio.open_connection("127.0.0.1", rig.server.port))
        client.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
        )
        answer = await client.answer()
        client.close()
        assert answer.status == 401
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/metrics", "/ui", "/kvturn/v1/engines", "/kvturn/v1/settings"],
)
@pytest.mark.parametrize("length", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_what_needs_no_key_takes_no_body(keys_file: Path, path: str, length: str) -> None:
    """All bodies have one budget: nobody without a key takes what turns of others need."""
    flags = (f"--api-keys-file={keys_file}", "--max-body-mb=1", "--max-bodies-mb=1")
    async with router(*flags) as rig:
        client = await rig.client()
        client.writer.write(f"POST {path} HTTP/1.1\r\nhost: r\r\n{length}\r\n\r\n".encode())
        client.writer.write(b"f423f\r\n" + b"x" * 990_000)
        answer = await client.answer()
        assert answer.status == 413
        assert answer.headers["connection"] == "close"
        assert "operator" in answer.json["error"]["message"]
        # The one who sends goes on to hold its connection; the turn has room all the same.
        turn = await rig.post(turn_body(user="x" * 100_000), headers=[bearer(KEY)])
        assert turn.status == 200


async def test_an_operator_may_send_any_body_where_no_key_is_needed(tmp_path: Path) -> None:
    """In chunks too, as some clients write whatever they send."""
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text(f"{KEY}\n")
    admin.write_text(f"{OTHER}\n")
    body = json.dumps({"url": "http://127.0.0.1:1", "role": "decode"}).encode()
    async with router(f"--api-keys-file={keys}", f"--admin-keys-file={admin}") as rig:
        client = await rig.client()
        client.writer.write(
            b"POST /kvturn/v1/engines HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n"
            b"authorization: Bearer %b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            % (OTHER.encode(), len(body), body)
        )
        assert (await client.answer()).status == 200
        short = await rig.ask("POST", "/kvturn/v1/engines", body)
        assert short.status == 401


async def test_a_grpc_call_without_a_key_is_refused_unread(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, whether its message is long or never comes: nothing of it is taken."""

    def unread(front: object, context: object) -> None:
        pytest.fail("its message was read")

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(grpc_front.GrpcFront, "_received", unread)
    long = router_pb2.CompleteRequest(body_json="x" * (8 << 20)).SerializeToString()
    async with router(f"--api-keys-file={keys_file}") as rig:
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            for method in ("Complete", "GetConversation"):
                path = f"/kvturn.v1.RouterService/{method}"
                for call in (
                    channel.stream_unary(path)(never(), timeout=60),
                    channel.unary_unary(path)(long, timeout=60),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_names_its_tenant_and_goes_no_further(keys_file: Path) -> None:
    """Two keys, two tenants; no engine and no lease service ever sees a key."""
    lease = FakeLease()
    async with router(f"--api-keys-file={keys_file}", lease=lease) as rig:
        for key in (KEY, OTHER):
            answer = await rig.post(turn_body(conversation_id="c"), headers=[bearer(key)])
            assert answer.status == 200
            await rig.ask("GET", "/v1/models", headers=[bearer(key)])
            path = "/kvturn/v1/conversations/c?model=m"
            assert (await rig.ask("DELETE", path, headers=[bearer(key)])).status == 200
        for engine in (rig.prefill, rig.decode):
            assert engine.turns
            for seen in engine.seen:
                assert seen.header("authorization") is None
                assert KEY not in str(seen)
        assert [key.tenant for key in lease.ended] == ["team-a", unnamed(OTHER.encode())]


async def test_engines_get_their_own_key_alone(keys_file: Path, tmp_path: Path) -> None:
    """With a key for engines set they get that one, for turns, models and health alike."""
    own = tmp_path / "own"
    own.write_text("engine-key\n")
    async with router(f"--api-keys-file={keys_file}", f"--engine-api-key-file={own}") as rig:
        await rig.post(turn_body(), headers=[bearer(KEY)])
        await rig.ask("GET", "/v1/models", headers=[bearer(KEY)])
        seen = [*rig.prefill.seen, *rig.decode.seen]
        assert {each.header("authorization") for each in seen} == {"Bearer engine-key"}


async def test_engines_get_the_key_that_their_file_holds_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced while the router runs: turns, models and health go on with the new one."""
    monkeypatch.setattr("kvturn.watched.LOOK_INTERVAL_S", 0)
    own = tmp_path / "own"
    own.write_text("engine-key\n")
    async with router(f"--engine-api-key-file={own}") as rig:
        await rig.post(turn_body())
        new = tmp_path / "new"
        new.write_text("another-key\n")
        new.rename(own)
        await rig.post(turn_body())
        await rig.ask("GET", "/v1/models")
        models = [one for one in rig.decode.seen if one.path == "/v1/models"]
        for one in (rig.prefill.turns[-1], rig.decode.turns[-1], *models):
            assert one.header("authorization") == "Bearer another-key"
        another = ("/health", "Bearer another-key")
        await rig.until(
            lambda: another in [(one.path, one.header("authorization")) for one in rig.decode.seen]
        )
        new.write_text("two\nkeys\n")
        new.rename(own)
        await rig.post(turn_body())
        assert rig.decode.turns[-1].header("authorization") == "Bearer another-key"


async def test_without_keys_engines_judge_the_clients_own() -> None:
    """As ever: the client's header goes on as it came, and any is taken."""
    async with router() as rig:
        assert (await rig.post(turn_body(), headers=[bearer("anything")])).status == 200
        assert (await rig.decode.turn()).header("authorization") == "Bearer anything"


async def test_a_key_that_comes_twice_is_none(keys_file: Path) -> None:
    """Two headers cannot mean one key here and another one elsewhere."""
    async with router(f"--api-keys-file={keys_file}") as rig:
        answer = await rig.post(turn_body(), headers=[bearer(KEY), bearer(OTHER)])
        assert answer.status == 401


async def test_the_grpc_front_asks_for_the_same_keys(keys_file: Path) -> None:
    """UNAUTHENTICATED without one; health stays open."""
    async with router(f"--api-keys-file={keys_file}") as rig:
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            ask = router_pb2.CompleteRequest(body_json=json.dumps(turn_body()))
            known = router_pb2.GetConversationRequest(conversation_id="c", model="m")
            for metadata in ((), (bearer(KEY + "x"),), (bearer(KEY), bearer(OTHER))):
                for call in (
                    stub.Complete(ask, metadata=metadata),
                    stub.GetConversation(known, metadata=metadata),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not rig.decode.turns
            answer = await stub.Complete(ask, metadata=(bearer(KEY),))
            assert answer.body_json
            assert (await rig.decode.turn()).header("authorization") is None
            health = health_pb2_grpc.HealthStub(channel)
            serving = await health.Check(health_pb2.HealthCheckRequest())
            assert serving.status == health_pb2.HealthCheckResponse.SERVING


async def test_no_key_and_no_prompt_is_in_logs_or_spans(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the most talkative level, for turns that go well, are refused and fail."""
    caplog.set_level(logging.DEBUG)
    recording = Recording()
    secret = "the launch code is 0000"
    body = turn_body(messages=[{"role": "user", "content": secret}])
    lease = FakeLease()
    async with router(
        f"--api-keys-file={keys_file}", lease=lease, tracing=recording.tracing
    ) as rig:
        assert (await rig.post(body, headers=[bearer(KEY)])).status == 200
        assert (await rig.post(body, headers=[bearer("kvt-wrongwrong")])).status == 401
        rig.decode.script(CHAT, lambda _, reply: reply.raw(b"no HTTP at all\r\n\r\n"))
        assert (await rig.post(body, headers=[bearer(KEY)])).status == 502
    told = caplog.text + "".join(map(str, recording.spans()))
    assert 'name: "turn"' in told
    for word in (KEY, "kvt-wrong", "launch", "remote_block_ids"):
        assert word not in told


def test_keys_are_read_again_when_their_file_changes(keys_file: Path) -> None:
    """Old keys are gone with the next look, also where nobody looked for long."""
    time = Time()
    keys = Watched((keys_file,), lambda: parse_keys("keys", keys_file), time)
    write(keys_file, f"{OTHER}x team-b\n")
    assert keys.value.name_of(KEY.encode()) == "team-a"
    time.now_s = LOOK_INTERVAL_S
    assert keys.value.name_of(KEY.encode()) is None
    assert keys.value.name_of(f"{OTHER}x".encode()) == "team-b"


@pytest.mark.parametrize("broken", ["", "too short\n", None])
def test_a_broken_new_file_keeps_the_old_keys_with_one_line(
    keys_file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty, wrong or gone: said once; when it is mended it counts."""
    time = Time()
    keys = Watched((keys_file,), lambda: parse_keys("--api-keys-file", keys_file), time)
    if broken is None:
        keys_file.unlink()
    else:
        write(keys_file, broken)
    for _ in range(3):
        time.now_s += LOOK_INTERVAL_S
        assert keys.value.name_of(KEY.encode()) == "team-a"
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(keys_file) in record.getMessage()
    write(keys_file, f"{OTHER}\n")
    time.now_s += LOOK_INTERVAL_S
    assert keys.value.name_of(KEY.encode()) is None


def test_a_file_is_read_once_it_is_written_whole(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Written in place, slowly: emptied, then line by line; no look takes a part for the whole."""
    time = Time()
    keys = Watched((keys_file,), lambda: parse_keys("keys", keys_file), time)
    for part in ("", f"{OTHER} team-b\n", f"{OTHER} team-b\n{KEY} team-c\n"):
        keys_file.write_text(part)
        time.now_s += LOOK_INTERVAL_S
        assert keys.value.name_of(KEY.encode()) == "team-a"
    assert not caplog.records
    time.now_s += LOOK_INTERVAL_S
    assert keys.value.name_of(KEY.encode()) == "team-c"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1: a key must have 8 to 512 bytes"),
        (f"{'k' * 513}\n", "line 1: a key must have 8 to 512 bytes"),
        (f"{KEY} a b\n", "line 1 must be KEY or KEY NAME"),
        (f"{KEY} n\u00e4me\n", "line 1 must be KEY or KEY NAME"),
        (f"{KEY} {'n' * 129}\n", "line 1: a name must have at most 128 bytes"),
        (f"{KEY} a\n{KEY} b\n", "line 2 repeats the key of an earlier line"),
    ],
)
def test_a_wrong_file_is_refused_by_line_without_showing_keys(
    keys_file: Path, text: str, problem: str
) -> None:
    """At start, in one line that names flag and file, and never a key."""
    keys_file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        parse_config([*ENGINES, f"--api-keys-file={keys_file}"], {})
    said = str(refused.value)
    assert said.startswith(f"--api-keys-file {keys_file}")
    assert problem in said
    assert "\n" not in said
    assert KEY not in said


def test_settings_that_name_the_tenant_twice_are_refused(keys_file: Path) -> None:
    """The key names it; a header besides would let a client choose."""
    flags = [*ENGINES, f"--api-keys-file={keys_file}", "--tenant-header=x-tenant"]
    with pytest.raises(ConfigError, match="--tenant-header and --api-keys-file"):
        parse_config(flags, {})


def test_operators_need_a_key_of_their_own(keys_file: Path) -> None:
    """Without a file of them there are no admin routes at all."""
    with pytest.raises(TurnError) as refused:
        operator_of(None, {"authorization": f"Bearer {KEY}"})
    assert refused.value.status == 403
    keys = ApiKeys(watched_keys("--admin-keys-file", keys_file))
    assert operator_of(keys, {"authorization": f"Bearer {KEY}"}) == "team-a"
    with pytest.raises(TurnError) as refused:
        operator_of(keys, {"authorization": "Bearer other-other"})
    assert refused.value.status == 401


def test_secrets_that_everybody_can_read_are_warned_of(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per file; none for a private one or one that is not there."""
    warn_of_open_secrets([keys_file, Path("/does/not/exist")])
    assert not caplog.records
    keys_file.chmod(0o644)
    warn_of_open_secrets([keys_file])
    assert "chmod o-r" in caplog.records[0].getMessage()


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """Missing, or a folder."""
    for file in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileFault, match="cannot be read"):
            parse_keys("--api-keys-file", file)


@pytest.mark.parametrize(
    "head",
    [
        b"authorization: Bearer a\r\nb: c",
        b"x-conversation-id: a\nb: c",
        b"x-conversation-id: a\rb: c",
        b"x-request-id: a\x00b",
        b"tracestate: a\x00b",
    ],
)
async def test_no_header_of_a_client_breaks_out_of_its_line(head: bytes) -> None:
    """What ends a header ends it here too: engines get no header that a client made up."""
    async with router() as rig:
        body = json.dumps(turn_body()).encode()
        client = Client(*await asyncio.open_connection("127.0.0.1", rig.server.port))
        client.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\n%b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (head, len(body), body)
        )
        answer = await client.answer()
        client.close()
        assert answer.status in (200, 400)
        for seen in rig.decode.turns:
            assert seen.header("b") is None
            assert all("\x00" not in value for _, value in seen.headers)


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "a\nb", "a\x00b", "\u00e4\r\n"])
async def test_no_name_in_a_body_breaks_out_of_a_header(name: str) -> None:
    """Conversation ids come back percent-encoded, whatever is in them."""
    async with router() as rig:
        answer = await rig.post(turn_body(conversation_id=name))
        if answer.status == 200:
            assert "x-evil" not in answer.headers
            assert answer.headers["x-kvturn-conversation"].isascii()
        for seen in rig.decode.turns:
            assert seen.header("x-evil") is None


async def test_both_fronts_refuse_the_same_bodies() -> None:
    """Too long: 413 and RESOURCE_EXHAUSTED; too deep: 400 and INVALID_ARGUMENT. No engine sees."""
    bodies = [
        (json.dumps(turn_body(pad="x" * (1 << 20))), 413, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (
            json.dumps(turn_body())[:-1] + f', "deep": {"[" * 200}{"]" * 200}}}',
            400,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ]
    async with router("--max-body-mb=1") as rig:
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            for body, status, code in bodies:
                assert (await rig.post(body.encode())).status == status
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Complete(router_pb2.CompleteRequest(body_json=body))
                assert refused.value.code() is code
        assert not rig.prefill.turns
        assert not rig.decode.turns
