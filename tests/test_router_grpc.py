"""The gRPC front: the same turns, with HTTP's fidelity."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, Reply, Seen, chunk, event

from kvturn.v1 import common_pb2, router_pb2, router_pb2_grpc


@contextlib.asynccontextmanager
async def dial(
    rig: Rig,
) -> AsyncIterator[tuple[grpc.aio.Channel, router_pb2_grpc.RouterServiceStub]]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    target = f"127.0.0.1:{rig.server.grpc_port}"
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield channel, router_pb2_grpc.RouterServiceStub(channel)


def chat(conversation_id: str = "c1", reuse: str = "", **members: object) -> router_pb2.ChatRequest:
    return router_pb2.ChatRequest(
        conversation_id=conversation_id, body_json=json.dumps(turn_body(**members)), reuse=reuse
    )


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "kvturn.v1"
    return info


async def test_chat_streams_the_engines_own_chunks_after_the_report():
    """Integers beyond doubles, tool calls and unknown keys arrive as JSON text."""
    texts = [
        json.dumps(chunk({"tool_calls": [{"index": 0}]}, seed=123456789012345678901234567890)),
        '{"spaced" : [1.50]}',
    ]

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(b": keep-alive\n\n")
        for text in texts:
            await reply.send(b"data: " + text.encode() + b"\n\n")
        await reply.end_stream()

    async with router(lease=FakeLease(lease_id="inc.1.1")) as rig, dial(rig) as (_, stub):
        rig.prefill.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 40}
        rig.decode.script(CHAT, play)
        parts = [part async for part in stub.Chat(chat(tools=[{"type": "function"}]))]
        report = parts[0].report
        assert report.conversation_id == "c1"
        assert report.verdict == common_pb2.VERDICT_REUSED
        assert (report.turn, report.prompt_tokens, report.reused_tokens) == (1, 48, 40)
        assert report.prefill_time.ToMicroseconds() > 0
        assert [part.chunk_json for part in parts[1:]] == texts
        assert rig.prefill.turns[0].json["kv_transfer_params"]["kvturn"]["conversation"] == "c1"
        assert rig.decode.turns[0].json["stream"] is True


async def test_complete_returns_the_engines_own_answer():
    """Not streamed, whatever the body says; a conversation is minted where none is named."""
    async with router() as rig, dial(rig) as (_, stub):
        body = json.dumps(turn_body(stream=True, stream_options={"include_usage": True}))
        answer = await stub.Complete(router_pb2.CompleteRequest(body_json=body))
        assert json.loads(answer.body_json)["choices"][0]["message"]["content"]
        assert answer.report.conversation_id.startswith("conv-")
        sent = rig.decode.turns[0].json
        assert sent["stream"] is False
        assert "stream_options" not in sent


async def test_reuse_off_and_conversations_are_the_callers_own():
    """reuse="off" turns reuse off; reports are kept per tenant; ending goes to the service."""
    async with router(lease=FakeLease()) as rig, dial(rig) as (_, stub):
        mine = (("authorization", "Bearer k"),)
        parts = [part async for part in stub.Chat(chat(reuse="off"), metadata=mine)]
        assert parts[0].report.verdict == common_pb2.VERDICT_TURNED_OFF
        asked = router_pb2.GetConversationRequest(conversation_id="c1", model="m")
        told = await stub.GetConversation(asked, metadata=mine)
        assert [turn.verdict for turn in told.turns] == [common_pb2.VERDICT_TURNED_OFF]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetConversation(asked)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert error_info(error.value).reason == "CONVERSATION_NOT_FOUND"
        end = router_pb2.RouterServiceEndConversationRequest(conversation_id="c1", model="m")
        assert (await stub.EndConversation(end, metadata=mine)).leases_ended == 1
        assert rig.lease.ended[0].tenant.startswith("key-")


async def test_a_client_keeps_its_conversation_alive():
    """For an absence or for the idle time, of its own tenant, answered with how long it is kept."""
    async with router(lease=FakeLease()) as rig, dial(rig) as (_, stub):
        mine = (("authorization", "Bearer k"),)
        request = router_pb2.RouterServiceKeepConversationAliveRequest(
            conversation_id="c1", model="m"
        )
        assert (await stub.KeepConversationAlive(request, metadata=mine)).kept.seconds == 60
        request.absence.FromMilliseconds(90_500)
        await stub.KeepConversationAlive(request, metadata=mine)
        bare, away = rig.lease.kept
        assert not bare.HasField("absence")
        assert away.absence.ToMilliseconds() == 90_500
        assert away.conversation.tenant.startswith("key-")


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"absence": {"seconds": 0}}, "INVALID_ARGUMENT", "absence"),
        ({"absence": {"seconds": -1}}, "INVALID_ARGUMENT", "absence"),
        ({"absence": {"seconds": 86_401}}, "INVALID_ARGUMENT", "absence"),
        ({"model": ""}, "INVALID_ARGUMENT", "model"),
        ({"conversation_id": "x" * 257}, "INVALID_ARGUMENT", "conversation_id"),
        ({"conversation_id": "unknown"}, "NOT_FOUND", None),
    ],
)
async def test_a_wrong_keep_alive_names_the_field(changes, code, field):
    """And keeps nothing alive; no conversation of that name is another thing."""
    fields = {"conversation_id": "c1", "model": "m"} | changes
    request = router_pb2.RouterServiceKeepConversationAliveRequest(**fields)
    async with router(lease=FakeLease()) as rig, dial(rig) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.KeepConversationAlive(request)
        assert error.value.code().name == code
        assert error_info(error.value).metadata.get("field") == field
        assert len(rig.lease.kept) == (field is None)


async def test_without_a_lease_service_keep_alive_is_unimplemented():
    """Nothing is held that could be kept."""
    async with router() as rig, dial(rig) as (_, stub):
        request = router_pb2.RouterServiceKeepConversationAliveRequest(
            conversation_id="c1", model="m"
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.KeepConversationAlive(request)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (router_pb2.ChatRequest(body_json="{"), None),
        (router_pb2.ChatRequest(body_json="[]"), None),
        (router_pb2.ChatRequest(body_json='{"messages":[]}'), "model"),
        (router_pb2.ChatRequest(body_json='{"model":"m"}'), "messages"),
        (chat(reuse="maybe"), "reuse"),
        (chat(conversation_id="x" * 257), "conversation_id"),
    ],
)
async def test_a_bad_request_is_an_invalid_argument_that_names_the_field(request_, field):
    """As HTTP's 400, and no engine sees it."""
    async with router() as rig, dial(rig) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Chat(request_):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_info(error.value).metadata.get("field") == field
        assert not rig.prefill.turns


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (401, grpc.StatusCode.UNAUTHENTICATED),
        (404, grpc.StatusCode.NOT_FOUND),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (500, grpc.StatusCode.INTERNAL),
        (503, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_engines_refusal_is_mapped_and_its_body_told(status, code):
    """The status by a table, the engine's body in ErrorInfo."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "no"}}, status)

    async with router() as rig, dial(rig) as (_, stub):
        rig.prefill.script(CHAT, play)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Chat(chat()):
                pass
        assert error.value.code() is code
        info = error_info(error.value)
        assert info.metadata["http_status"] == str(status)
        assert json.loads(info.metadata["body"]) == {"error": {"message": "no"}}


async def test_a_stream_that_breaks_off_ends_with_a_status():
    """Decode dies in the middle: the chunks, then UNAVAILABLE; its own error event: its code."""

    async def die(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        reply.abort()

    async def fail(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await reply.send(event({"error": {"message": "boom", "code": 500}}))
        await reply.end_stream()

    async with router() as rig, dial(rig) as (_, stub):
        for play, code in ((die, grpc.StatusCode.UNAVAILABLE), (fail, grpc.StatusCode.INTERNAL)):
            rig.decode.script(CHAT, play)
            call = stub.Chat(chat())
            assert (await call.read()).report.turn
            assert json.loads((await call.read()).chunk_json) == chunk({"content": "The"})
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is code


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_call_that_ends_ends_its_legs(how, leg):
    """The client cancels, or its deadline passes: the engine's connection ends."""

    async def silent(seen: Seen, reply: Reply) -> None:
        await seen.gone.wait()

    async with router() as rig, dial(rig) as (_, stub):
        engine = getattr(rig, leg)
        engine.script(CHAT, silent)
        call = stub.Chat(chat(), timeout=0.5 if how == "deadline" else None)
        reading = asyncio.ensure_future(call.read())
        seen = await engine.turn(1)
        if how == "cancel":
            call.cancel()
        async with asyncio.timeout(10):
            await seen.gone.wait()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await reading
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        await rig.until(lambda: rig.server._gate.turns == 0)


async def test_many_cancelled_streams_leave_nothing_behind():
    """A hundred streams cancelled after one message: no turn, no task is left."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await seen.gone.wait()

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        calls = [stub.Chat(chat(f"c{number}")) for number in range(100)]
        for call in calls:
            assert (await call.read()).report.turn == 1
        for call in calls:
            call.cancel()
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        await rig.until(lambda: all(seen.gone.is_set() for seen in rig.decode.turns))


async def test_long_bodies_pass_up_to_the_limit_that_http_has():
    """Three megabytes pass; above the limit the status names it, on both fronts."""
    async with router("--max-body-mb=4") as rig, dial(rig) as (_, stub):
        answer = await stub.Complete(
            router_pb2.CompleteRequest(body_json=json.dumps(turn_body(user="x" * (3 << 20))))
        )
        assert answer.body_json
        for size in (4 << 20, 6 << 20):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Complete(
                    router_pb2.CompleteRequest(body_json=json.dumps(turn_body(user="x" * size)))
                )
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await rig.post(turn_body(user="x" * (4 << 20)))).status == 413


async def test_a_caller_that_does_not_read_slows_the_engine():
    """Decode has forty megabytes to send; a caller that reads nothing holds it up."""
    sent = 0
    total = 2_000

    async def play(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        await reply.begin_stream()
        data = event(chunk({"content": "x" * 20_000}))
        while sent < total:
            await reply.send(data * 10)
            sent += 10
        await reply.end_stream()

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        call = stub.Chat(chat())
        assert (await call.read()).report.turn == 1
        before = -1
        while before != sent:
            before = sent
            for _ in range(10):
                await rig.ask("GET", "/health")
        assert sent < total
        count = 0
        while (await call.read()) is not grpc.aio.EOF:
            count += 1
        assert count == total


async def test_health_and_reflection_answer():
    """ "" is alive; the service is serving only while a turn can be served."""
    name = "kvturn.v1.RouterService"
    async with router("--health-failures=1") as rig, dial(rig) as (channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        states = health_pb2.HealthCheckResponse

        async def state(service: str) -> int:
            asked = health_pb2.HealthCheckRequest(service=service)
            return int((await health.Check(asked)).status)

        assert await state("") == states.SERVING
        assert await state(name) == states.SERVING
        rig.prefill.healthy = False
        async with asyncio.timeout(30):
            while await state(name) != states.NOT_SERVING:
                pass
        assert await state("") == states.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = (await call.read()).list_services_response.service
        assert name in {service.name for service in services}
        await call.done_writing()


async def test_shutdown_ends_streams_with_a_status_and_refuses_new_calls():
    """The grace is over: an open stream ends UNAVAILABLE, decode's connection ends."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await seen.gone.wait()

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        call = stub.Chat(chat())
        assert (await call.read()).report.turn == 1
        stopping = asyncio.create_task(rig.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
        async with asyncio.timeout(10):
            await rig.decode.turns[0].gone.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Complete(router_pb2.CompleteRequest(body_json="{}"), timeout=5)
