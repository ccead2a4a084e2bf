"""Limits over all clients together: bytes of bodies, questions that are no turns."""

import asyncio
import contextlib
import json

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from metrics_page import MetricsPage
from router_harness import Answer, Client, FakeLease, Rig, router, turn_body
from stub_engine import CHAT, GUARD_S, Reply, Seen

from kvturn.v1 import router_pb2, router_pb2_grpc
from kvturn_router.config import ConfigError, parse_config
from kvturn_router.errors import TurnError
from kvturn_router.front.gate import QUESTIONS_MAX, Gate
from kvturn_router.request.responses import response_id

ONE_MB = ("--max-body-mb=1", "--max-bodies-mb=1")
MOST = 1 << 20


def body_of(size: int) -> bytes:
    """Returns a turn's body of exactly so many bytes."""
    short = json.dumps(turn_body(user="")).encode()
    body = json.dumps(turn_body(user="x" * (size - len(short)))).encode()
    assert len(body) == size
    return body


def assert_exhausted(answer: Answer) -> None:
    """In OpenAI's shape, and clients know when to come again."""
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json["error"]["type"] == "server_error"
    assert answer.json["error"]["message"].startswith("The bodies of all requests have")


async def begun(rig: Rig, body: bytes, sent: int) -> Client:
    """A client that has sent so much of its body, and the router has it."""
    client = await rig.client()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
    client.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:sent])
    await client.writer.drain()
    async with asyncio.timeout(GUARD_S):
        while await held(rig) < sent:
            pass
    return client


async def held(rig: Rig) -> float:
    """Returns how many bytes of bodies the router says that it holds."""
    page = MetricsPage((await rig.ask("GET", "/metrics")).body.decode())
    return page.value("kvturn_router_body_bytes")


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_have_a_budget_over_all_connections(chunked):
    """One client is sending most of it: another's body is refused before it is taken."""
    async with router(*ONE_MB) as rig:
        body = body_of(700_000)
        slow = await begun(rig, body, 690_000)
        client = await rig.client()
        if chunked:
            # Its length is not known: what fits is taken, and given back with the refusal.
            await client.send("POST", CHAT, headers=[("transfer-encoding", "chunked")])
            client.writer.write(b"".join(b"f000\r\n%b\r\n" % (b"x" * 0xF000) for _ in range(10)))
        else:
            await client.send("POST", CHAT, None, [("content-length", "700000")])
        assert_exhausted(await client.answer())
        slow.writer.write(body[690_000:])
        assert (await slow.answer()).status == 200
        assert (await rig.post(body_of(MOST))).status == 200


async def test_a_body_counts_until_its_answer_begins():
    """Also while its turn is served, and while it waits behind another on its connection."""
    free = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await free.wait()
        await rig.prefill.prefill(seen, reply)

    async with router(*ONE_MB) as rig:
        rig.prefill.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, body_of(300_000))
        await client.send("POST", CHAT, body_of(300_000))
        await rig.prefill.turn(1)
        async with asyncio.timeout(30):
            while (await rig.post(body_of(MOST - 600_000 + 1))).status != 503:  # noqa: ASYNC110
                await asyncio.sleep(0)
        free.set()
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert (await rig.post(body_of(MOST))).status == 200


async def test_bodies_of_clients_that_leave_or_are_refused_are_given_back():
    """In the midst of a body, with one more sent ahead, and with a body too long."""
    never = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await seen.gone.wait()
        never.set()

    async with router(*ONE_MB) as rig:
        (await begun(rig, body_of(900_000), 800_000)).close()
        assert (await rig.ask("POST", CHAT, b"{" * (MOST + 1))).status == 413
        rig.prefill.script(CHAT, play)
        client = await rig.client()
        await client.send("POST", CHAT, body_of(300_000))
        await client.send("POST", CHAT, body_of(300_000))
        await rig.prefill.turn(1)
        client.close()
        await never.wait()
        rig.prefill.script(CHAT, rig.prefill.prefill)
        async with asyncio.timeout(30):
            while (await rig.post(body_of(MOST))).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_grpc_has_the_same_budget():
    """UNAVAILABLE, which clients try again, with the reason and when."""
    async with router("--max-body-mb=1", "--max-bodies-mb=1") as rig:
        slow = await begun(rig, body_of(700_000), 690_000)
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            request = router_pb2.CompleteRequest(body_json=body_of(500_000).decode())
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Complete(request)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert unpacked(error.value) == ("BODIES_EXHAUSTED", 1)
            slow.close()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await stub.Complete(request)
                        return
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0)


def unpacked(error: grpc.aio.AioRpcError) -> tuple[str, int]:
    """Returns an error's reason and its delay in seconds."""
    status = rpc_status.from_call(error)
    assert status is not None
    info, again = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(again)
    return info.reason, again.retry_delay.seconds


def test_a_budget_must_hold_one_body():
    """Else the longest body that is allowed would never be served."""
    with pytest.raises(ConfigError, match="--max-bodies-mb must be at least --max-body-mb"):
        parse_config(["--prefill=http://a:1", "--decode=http://b:1", "--max-bodies-mb=63"], {})


# ---- questions -----------------------------------------------------------------------------------


async def test_questions_have_a_number_and_a_time():
    """One too many is a 429, one that takes too long a 504; both leave their place."""
    gate = Gate(1, questions_max=2, question_s=0.01)

    async def ask(answered: asyncio.Event) -> None:
        async with gate.question():
            await answered.wait()

    answered = asyncio.Event()
    answered.set()
    for _ in range(2):
        late = [asyncio.create_task(ask(asyncio.Event())) for _ in range(3)]
        errors = await asyncio.gather(*late, return_exceptions=True)
        assert [error.status for error in errors if isinstance(error, TurnError)] == [504, 504, 429]
        await ask(answered)


async def test_too_many_questions_are_refused_and_turns_are_not():
    """A thousand are being answered."""
    async with router(lease=FakeLease()) as rig, contextlib.AsyncExitStack() as asked:
        for _ in range(QUESTIONS_MAX):
            await asked.enter_async_context(rig.server._gate.question())
        path = "/kvturn/v1/conversations/c"
        for method, target in (
            ("GET", f"{path}?model=m"),
            ("DELETE", f"{path}?model=m"),
            ("POST", f"{path}/keepalive?model=m"),
            ("GET", "/v1/models"),
        ):
            answer = await rig.ask(method, target)
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert answer.json["error"]["type"] == "rate_limit_error"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.grpc_port}") as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.EndConversation(
                    router_pb2.RouterServiceEndConversationRequest(conversation_id="c", model="m")
                )
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert unpacked(error.value) == ("TOO_MANY_QUESTIONS", 1)
        assert (await rig.post(turn_body())).status == 200


async def test_what_an_engine_keeps_of_a_response_counts_as_a_turn():
    """It may be a stream as long as a turn's: with one turn at once, no other is served."""

    async def play(seen: Seen, reply: Reply) -> None:
        asked.set()
        await seen.gone.wait()

    asked = asyncio.Event()
    async with router("--max-inflight=1") as rig:
        name = response_id("", "c", rig.decode.url.removeprefix("http://"), "0" * 24)
        rig.decode.script(f"/v1/responses/{name}", play)
        client = await rig.client()
        await client.send("GET", f"/v1/responses/{name}")
        await asked.wait()
        assert (await rig.post(turn_body())).status == 429
        client.close()
        async with asyncio.timeout(30):
            while (await rig.post(turn_body())).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0)
