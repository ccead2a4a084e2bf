"""The gRPC front: the same turns, with HTTP's fidelity."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from awake import within
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, COMPLETIONS, Reply, Seen, chunk, event

from kvturn.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvturn_router.engines.fleet import Fleet
from kvturn_router.front import grpc_answer, grpc_front, grpc_open
from kvturn_router.front.body_budget import BodyBudget
from kvturn_router.front.grpc_front import GrpcFront
from kvturn_router.leases.turn_report import report_message, report_of
from kvturn_router.request.conversation import TurnReport
from kvturn_router.verdict import Verdict

_DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


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


def complete(**members: object) -> router_pb2.CompleteRequest:
    return router_pb2.CompleteRequest(body_json=json.dumps(turn_body(**members)))


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
        await rig.lease.until(lambda: rig.lease.turns_ended)
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
        (router_pb2.ChatRequest(conversation_id="c", scope="s"), "scope"),
        (router_pb2.ChatRequest(body_json='{"model":"m","messages":[]}', api=9), "api"),
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
        assert error.value.details() == f"the engine answered {status}: no"
        info = error_info(error.value)
        assert info.metadata["http_status"] == str(status)
        assert json.loads(info.metadata["body"]) == {"error": {"message": "no"}}


@pytest.mark.parametrize(("retry_after", "seconds"), [("7", 7), (_DATE, None)])
async def test_an_engines_retry_after_reaches_the_caller(retry_after, seconds):
    """In ErrorInfo as it came, and as RetryInfo where it is a number of seconds."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.whole(b"{}", 429, ("retry-after", retry_after))

    async with router() as rig, dial(rig) as (_, stub):
        rig.prefill.script(CHAT, play)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Complete(complete())
        assert error_info(error.value).metadata["retry_after"] == retry_after
        details = rpc_status.from_call(error.value).details
        assert len(details) == (1 if seconds is None else 2)
        if seconds is not None:
            again = error_details_pb2.RetryInfo()
            assert details[1].Unpack(again)
            assert again.retry_delay.seconds == seconds


async def test_a_long_error_is_cut_to_what_clients_take():
    """Of a body of 100 KB in two-byte letters a client with default limits gets the beginning."""

    async def play(seen: Seen, reply: Reply) -> None:
        text = json.dumps({"error": {"message": "é" * 50_000}}, ensure_ascii=False)
        await reply.whole(text.encode(), 400)

    async with router() as rig, dial(rig) as (_, stub):
        rig.prefill.script(CHAT, play)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Complete(complete())
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(error.value.details()) < 600
        trailing = dict(error.value.trailing_metadata())
        details = len(trailing["grpc-status-details-bin"]) * 4 / 3
        assert details + len(quote(error.value.details())) < 7800
        assert error_info(error.value).metadata["body"].startswith('{"error": {"message": "éé')


async def test_headers_besides_the_answer_reach_the_caller_as_metadata():
    """An engine's own, as many as clients take, and the caller's id; not what is about HTTP."""

    async def play(seen: Seen, reply: Reply) -> None:
        text = json.dumps(rig.decode.whole_answer(seen)).encode()
        load = ("endpoint-load-metrics", "JSON {}")
        long = [
            (f"x-long-{number}", "x" * size) for number, size in enumerate((60_000, 3000, 3000))
        ]
        await reply.whole(text, 200, *long, load)

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        sent = (("x-request-id", "r-1"), ("x-session-id", "s"), ("x-session-id", "t"))
        call = stub.Complete(complete(), metadata=sent)
        await call
        assert dict(await call.initial_metadata()) == {
            "endpoint-load-metrics": "JSON {}",
            "x-request-id": "r-1",
            "x-long-1": "x" * 3000,
        }
        assert rig.decode.turns[0].header("x-session-id") == "s, t"


async def test_metadata_counts_as_headers_do():
    """Trace, tenant and an agent's session: to the engines and in the conversation's name."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    sent = (
        ("traceparent", f"00-{trace}-b7ad6b7169203331-01"),
        ("x-tenant", "acme"),
        ("x-session-id", "s-1"),
        ("authorization", "Bearer k"),
    )
    async with router("--tenant-header=X-Tenant", lease=FakeLease()) as rig, dial(rig) as (_, stub):
        async for _ in stub.Chat(chat("c1"), metadata=sent):
            pass
        for seen in (rig.prefill.turns[0], rig.decode.turns[0]):
            assert trace in (seen.header("traceparent") or "")
            assert seen.header("x-session-id") == "s-1"
            assert seen.header("authorization") == "Bearer k"
        kvturn = rig.prefill.turns[0].json["kv_transfer_params"]["kvturn"]
        assert (kvturn["tenant"], kvturn["conversation"]) == ("acme", "c1")


def test_a_report_is_the_same_as_a_message():
    """Every field there is, there and back; what is not known is absent."""
    full = TurnReport(
        turn=2,
        verdict=Verdict.REUSED,
        prompt_tokens=48,
        reused_tokens=40,
        local_tokens=4,
        prefill_ms=1.5,
        read_ms=0.25,
        read_bytes=1 << 40,
        plan="pull",
        first_byte_ms=12.0,
        output_tokens=7,
        prefill_engine="http://p:1",
        decode_engine="http://d:1",
        plan_reason="cheapest at_holder pull_ms=1.0",
        total_ms=900.5,
        age_ms=60_000.0,
    )
    message = report_message("c1", full)
    told = {field.name for field, _ in message.ListFields()}
    assert told == set(message.DESCRIPTOR.fields_by_name) - {"saved_time", "trace_id"}
    assert message.plan == common_pb2.PLAN_KIND_PULL
    assert report_of(message) == full
    bare = TurnReport(1, Verdict.FIRST_TURN, 0, 0, 0, 0.0, 0.0, 0)
    assert not report_message("c1", bare).HasField("first_byte_time")
    assert report_of(report_message("c1", bare)) == bare
    assert report_of(common_pb2.TurnReport(plan=99, verdict=99)).plan == ""


@pytest.mark.parametrize("stream", [True, False])
async def test_texts_are_completed_too(stream):
    """`api` says which of the engine's APIs a body goes to."""
    body = json.dumps({"model": "m", "prompt": "The capital", "max_tokens": 4})
    api = router_pb2.API_COMPLETIONS
    async with router() as rig, dial(rig) as (_, stub):
        if stream:
            parts = [x async for x in stub.Chat(router_pb2.ChatRequest(body_json=body, api=api))]
            assert len(parts) > 2
        else:
            answer = await stub.Complete(router_pb2.CompleteRequest(body_json=body, api=api))
            assert json.loads(answer.body_json)["choices"][0]["text"]
        assert [seen.path for seen in rig.decode.turns] == [COMPLETIONS]
        assert rig.decode.turns[0].json["prompt"] == "The capital"


async def test_an_answer_is_never_silently_less_than_the_engines():
    """Not streamed: one chunk. Without the event that ends a stream, or not UTF-8: not OK."""
    whole = json.dumps({"choices": [{"message": {"content": "é"}}]}, ensure_ascii=False)

    async def not_streamed(seen: Seen, reply: Reply) -> None:
        await reply.whole(whole.encode(), 200)

    async def without_end(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(b'data: {"n":1}\n\ndata: {"n":2}')
        await reply.raw(b"0\r\n\r\n")

    async def not_text(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.send(b'data: "\xff"\n\n')
        await reply.end_stream()

    async def heard(stub: router_pb2_grpc.RouterServiceStub) -> tuple[list[str], str]:
        call = stub.Chat(chat())
        chunks: list[str] = []
        try:
            async for part in call:
                if part.HasField("chunk_json"):
                    chunks.append(part.chunk_json)  # noqa: PERF401
        except grpc.aio.AioRpcError as error:
            return chunks, error_info(error).reason
        return chunks, ""

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, not_streamed)
        assert await heard(stub) == ([whole], "")
        rig.decode.script(CHAT, without_end)
        assert await heard(stub) == (['{"n":1}', '{"n":2}'], "STREAM_UNFINISHED")
        rig.decode.script(CHAT, not_text)
        assert await heard(stub) == ([], "ANSWER_UNREADABLE")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Complete(complete())
        assert error_info(error.value).reason == "ANSWER_UNREADABLE"


async def test_an_answer_that_is_no_stream_is_kept_to_a_limit_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    """What an engine sends without end instead of events does not fill the router's memory."""
    monkeypatch.setattr(grpc_answer, "ANSWER_BYTES_MAX", 1_000)

    async def long(seen: Seen, reply: Reply) -> None:
        await reply.whole(b'"%b"' % (b"x" * 1_000), 200)

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, long)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Chat(chat()):
                pass
        assert error_info(error.value).reason == "ANSWER_UNREADABLE"
        assert "longer than 1000 bytes" in (error.value.details() or "")
    answer = grpc_answer.GrpcAnswer()
    for _ in range(3):
        answer.write(b"x" * 600, False)
    assert not answer._pieces


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
        call = stub.Chat(chat(), timeout=3 if how == "deadline" else None)
        reading = asyncio.ensure_future(call.read())
        seen = await engine.turn(1)
        if how == "cancel":
            call.cancel()
        async with within(10):
            await seen.gone.wait()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await reading
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        await rig.until(lambda: rig.server._gate.turns == 0)


async def test_a_turn_whose_stream_was_taken_whole_is_no_turn_that_was_left():
    """The stream's end comes by itself, the caller waiting for it: the turn was served, and told
    as one that decode retains."""
    taken = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "Paris"}, "stop"))
        await taken.wait()
        await reply.end_stream()

    async with router(lease=FakeLease()) as rig, dial(rig) as (_, stub):
        rig.prefill.report = {"verdict": "first_turn", "prompt_tokens": 48}
        rig.decode.script(CHAT, play)
        call = stub.Chat(chat())
        assert (await call.read()).report.turn == 1
        assert (await call.read()).chunk_json
        taken.set()
        assert await call.read() is grpc.aio.EOF
        await rig.lease.until(lambda: rig.lease.turns_ended)
        (ended,) = rig.lease.turns_ended
        assert ended.retains
        assert ended.report.prompt_tokens == 48
        page = (await rig.ask("GET", "/metrics")).body.decode()
        assert 'kvturn_router_turns_total{outcome="ok"' in page
        assert 'outcome="hung_up"' not in page


async def test_many_cancelled_streams_leave_nothing_behind():
    """Five hundred streams cancelled after one message: no turn and no task is left."""

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    async with router() as rig, dial(rig) as (_, stub):
        await stub.Complete(complete())
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        rig.decode.script(CHAT, play)
        tasks = len(asyncio.all_tasks())
        calls = [stub.Chat(chat(f"c{number}")) for number in range(500)]
        for call in calls:
            assert (await call.read()).report.turn == 1
        for call in calls:
            call.cancel()
        del call, calls
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        await rig.until(lambda: all(seen.gone.is_set() for seen in rig.decode.turns[1:]))
        await rig.until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_burst_of_calls_waits_for_its_turn():
    """1,500 calls come while the router is busy: fewer than it takes, and none is dropped.

    They are sent from its own thread, so that it takes none before all are on their way.
    """
    async with router() as rig:
        own = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{rig.server.grpc_port}", options=own) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            request = router_pb2.GetConversationRequest()
            calls = [stub.GetConversation.future(request) for _ in range(1500)]
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_a_client_that_pings_often_is_not_sent_away():
    """Ten pings a second, without a call and within one: no GOAWAY, the next call succeeds."""
    eager = [
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await seen.gone.wait()

    async with router() as rig:
        target = f"127.0.0.1:{rig.server.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=eager) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            await stub.Complete(complete())
            states = [channel.get_state()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await channel.wait_for_state_change(states[0])
                    states.append(channel.get_state())
            assert states == [grpc.ChannelConnectivity.READY]
            rig.decode.script(CHAT, play)
            call = stub.Chat(chat(), timeout=1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in call:
                    pass
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_long_bodies_pass_up_to_the_limit_that_http_has():
    """Three megabytes pass; above four the status names the limit, as HTTP's 413 does.

    Far above it gRPC refuses the message unread, in its own words.
    """
    async with router("--max-body-mb=4") as rig, dial(rig) as (_, stub):
        assert (await stub.Complete(complete(user="x" * (3 << 20)))).body_json
        for size in (4 << 20, 8 << 20, 16 << 20):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Complete(complete(user="x" * size))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if size <= 8 << 20:
                assert error.value.details() == f"body_json has more than {4 << 20} bytes."
                assert error_info(error.value).reason == "BODY_TOO_LARGE"
        assert (await rig.post(turn_body(user="x" * (4 << 20)))).status == 413


async def test_long_metadata_passes_up_to_the_limit_that_http_heads_have():
    """Agents send long headers: 60 KB pass, as in HTTP; more is refused."""
    async with router() as rig, dial(rig) as (_, stub):
        await stub.Complete(complete(), metadata=(("x-long", "a" * 60_000),))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Complete(complete(), metadata=(("x-long", "a" * 70_000),))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("data", [b"\x12\x03\xff\xfe\xfd", b"\xff\xff\xff"])
async def test_a_message_that_cannot_be_read_is_an_invalid_argument(data):
    """Text that is not UTF-8, and bytes that are no message: as HTTP's 400."""
    async with router() as rig, dial(rig) as (channel, _):
        for method in ("Complete", "GetConversation"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(f"/kvturn.v1.RouterService/{method}")(data)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_info(error.value).reason == "MESSAGE_INVALID"


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


async def test_a_caller_that_never_reads_is_given_up(monkeypatch):
    """It has taken nothing for the stall limit: the turn ends, and so does decode's work for it."""
    monkeypatch.setattr(grpc_front, "_STALL_S", 0.3)

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        while not seen.gone.is_set():
            await reply.event(chunk({"content": "x" * 20_000}))

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        call = stub.Chat(chat())
        await rig.until(lambda: rig.server._forwarder.in_flight == 1)
        await rig.until(lambda: rig.server._forwarder.in_flight == 0)
        async with within(10):
            await rig.decode.turns[0].gone.wait()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(30):
                [each async for each in call]
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_whose_first_message_is_not_taken_is_told(monkeypatch):
    """Given up before anything was written: the call ends all the same, with our own error."""
    monkeypatch.setattr(grpc_front, "_STALL_S", 0)
    async with router() as rig, dial(rig) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            [each async for each in stub.Chat(chat(), timeout=10)]
        assert error_info(error.value).reason == "SLOW"


async def test_calls_that_need_no_key_take_no_place_of_turns(monkeypatch, tmp_path):
    """They have places of their own, by method: one above is refused at once, and turns go on."""
    monkeypatch.setattr(grpc_open, "CALLS_MAX", 3)
    (tmp_path / "keys").write_text("kvt-0123456789abcdef\n")
    bearer = (("authorization", "Bearer kvt-0123456789abcdef"),)

    flags = (f"--api-keys-file={tmp_path}/keys", "--max-inflight=1")
    async with router(*flags) as rig, dial(rig) as (channel, stub):
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        talks = [reflection.ServerReflectionInfo() for _ in range(3)]
        for talk in talks:
            await talk.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await talk.read()
        for late in (
            health.Watch(health_pb2.HealthCheckRequest()),
            reflection.ServerReflectionInfo(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await late.read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Complete(complete(), metadata=bearer)).body_json
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        for watch in watches:
            watch.cancel()
        async with asyncio.timeout(30):
            while True:  # until the places are free again
                again = health.Watch(health_pb2.HealthCheckRequest())
                try:
                    await again.read()
                    break
                except grpc.aio.AioRpcError:
                    continue


async def test_a_health_question_whose_message_never_comes_is_given_up(monkeypatch):
    """gRPC itself would wait for it without an end."""
    monkeypatch.setattr(grpc_open, "_MESSAGE_S", 0.05)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with router() as rig, dial(rig) as (channel, _):
        for method in ("Check", "List"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.stream_unary(f"/grpc.health.v1.Health/{method}")(never(), timeout=60)
            assert error_info(refused.value).reason == "MESSAGE_INVALID"


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
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    async with router() as rig, dial(rig) as (_, stub):
        rig.decode.script(CHAT, play)
        call = stub.Chat(chat())
        assert (await call.read()).report.turn == 1
        assert (await call.read()).chunk_json
        stopping = asyncio.create_task(rig.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
        async with within(10):
            await rig.decode.turns[0].gone.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Complete(router_pb2.CompleteRequest(body_json="{}"), timeout=5)


async def test_a_router_that_ends_serves_the_calls_that_are_on_their_way():
    """Health says no at once; what was sent before its client could know is served to its end."""
    go_on = asyncio.Event()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "begun"}))
        await go_on.wait()
        await reply.end_stream()

    async with router("--grace-s=20") as rig, dial(rig) as (channel, stub):
        rig.decode.script(CHAT, play)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        before = stub.Chat(chat("before"))
        assert (await before.read()).report.turn == 1
        stopping = asyncio.create_task(rig.server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        underway = stub.Chat(chat("underway"))
        assert (await underway.read()).report.turn == 1
        async with asyncio.timeout(30):
            while True:
                try:
                    await stub.GetConversation(
                        router_pb2.GetConversationRequest(conversation_id="before", model="m")
                    )
                except grpc.aio.AioRpcError as error:
                    refused = error.code()
                    break
        assert refused in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert not stopping.done()
        go_on.set()
        for call in (before, underway):
            chunks = []
            while (response := await call.read()) is not grpc.aio.EOF:
                chunks.append(response.chunk_json)
            assert "begun" in chunks[0]
        watch.cancel()
        async with within(10):
            await stopping


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_a_notice_comes_before_the_end(front):
    """Balancers have time to see that it is not ready; until then new clients are served."""
    async with router("--drain-notice-s=1") as rig:
        stopping = asyncio.create_task(rig.server.stop())
        await asyncio.sleep(0)
        if front == "http":
            ready = await rig.ask("GET", "/ready")
            assert (ready.status, ready.json["reason"]) == (503, "shutting down")
            assert (await rig.post(turn_body())).status == 200
        else:
            async with dial(rig) as (channel, stub):
                health = health_pb2_grpc.HealthStub(channel)
                asked = health_pb2.HealthCheckRequest(service="kvturn.v1.RouterService")
                states = health_pb2.HealthCheckResponse
                assert (await health.Check(asked)).status == states.NOT_SERVING
                assert (await stub.Complete(complete())).body_json
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await rig.client()


async def test_a_message_that_does_not_come_is_waited_for_only_so_long():
    """A caller opens a call and sends nothing, or nothing to the end."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield

    servicer = router_pb2_grpc.RouterServiceServicer()
    front = GrpcFront(
        servicer,
        Fleet(lambda address, number: pytest.fail("it has no engine"), lambda: 0),
        BodyBudget(1 << 20),
        calls_max=10,
        message_s=0.05,
        body_bytes_max=1 << 20,
        head_bytes_max=1 << 16,
    )
    port = await front.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        complete = channel.stream_unary("/kvturn.v1.RouterService/Complete")
        for messages, code, reason in (
            (never(), grpc.StatusCode.DEADLINE_EXCEEDED, "SLOW"),
            (nothing(), grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_INVALID"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await complete(messages, timeout=20)
            assert error.value.code() is code
            assert error_info(error.value).reason == reason
    await front.stop(0)
