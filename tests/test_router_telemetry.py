"""One trace per turn: its spans, its way across processes, and an exporter nobody waits for."""

import asyncio
import json
import logging
import time

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from recorded_spans import Recording, export_of, told
from router_harness import FakeLease, router, turn_body
from stub_engine import CHAT, Reply, Seen, chunk

from kvturn_router.telemetry.span_export import OtlpExporter
from kvturn_router.telemetry.span_wire import CLIENT, SERVER, Span, span_bytes
from kvturn_router.telemetry.turn_trace import Telemetry, trace_context

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def span_id(traceparent: str | None) -> bytes:
    assert traceparent is not None
    return bytes.fromhex(traceparent.split("-")[2])


async def test_what_a_turn_that_hangs_has_done_is_seen():
    """Decode does not answer: the spans of all that is over are exported, the turn's is not."""
    recording = Recording()
    over = asyncio.Event()

    async def hang(seen: Seen, reply: Reply) -> None:
        await over.wait()
        await reply.json({"id": "chatcmpl-1", "choices": []})

    async with router(telemetry=recording.telemetry) as rig:
        rig.decode.script(CHAT, hang)
        turn = asyncio.create_task(rig.post(turn_body(), headers=[("traceparent", PARENT)]))
        await rig.decode.turn()
        assert [span.name for span in recording.spans(TRACE)] == ["plan", "prefill"]
        over.set()
        await turn
        assert {span.name for span in recording.spans(TRACE)} >= {"decode", "turn"}


async def test_a_turn_is_one_trace_across_all_processes():
    """The client's trace goes on: turn under it, and resolve, plan, both legs as siblings."""
    recording = Recording()
    async with router(lease=FakeLease(lease_id="inc.1.1"), telemetry=recording.telemetry) as rig:
        rig.prefill.report = {
            "verdict": "reused",
            "prompt_tokens": 48,
            "reused_tokens": 40,
            "local_tokens": 0,
            "read_ms": 1.5,
            "read_bytes": 4096,
        }
        body = turn_body(conversation_id="c1", stream=True, stream_options={"include_usage": True})
        await rig.post(body, headers=[("traceparent", PARENT), ("tracestate", "a=b")])
        spans = {span.name: span for span in recording.spans(TRACE)}
        turn = spans.pop("turn")
        assert turn.parent_span_id == span_id(PARENT)
        assert turn.kind == trace_pb2.Span.SPAN_KIND_SERVER
        assert set(spans) == {"resolve", "plan", "prefill", "decode"}
        for span in spans.values():
            assert span.parent_span_id == turn.span_id
            assert turn.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= turn.end_time_unix_nano
        prefill, decode = rig.prefill.turns[0], rig.decode.turns[0]
        for seen, name in ((prefill, "prefill"), (decode, "decode")):
            header = seen.header("traceparent")
            assert span_id(header) == spans[name].span_id
            assert seen.json["kv_transfer_params"]["kvturn"]["traceparent"] == header
            assert seen.header("tracestate") == "a=b"
        prefill_url, decode_url = rig.prefill.url, rig.decode.url
        assert told(turn) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.conversation.id": "c1",
            "gen_ai.request.model": "m",
            "gen_ai.usage.cache_read.input_tokens": 40,
            "gen_ai.usage.input_tokens": 48,
            "gen_ai.usage.output_tokens": 5,
            "kvturn.turn": 1,
            "kvturn.plan": "pull",
            "kvturn.plan.reason": "only_way no_holder",
            "kvturn.verdict": "reused",
            "kvturn.prompt_tokens": 48,
            "kvturn.reused_tokens": 40,
            "kvturn.local_tokens": 0,
            "kvturn.read_ms": 1.5,
            "kvturn.read_bytes": 4096,
            "kvturn.lease_id": "inc.1.1",
            "kvturn.prefill.engine": prefill_url,
            "kvturn.decode.engine": decode_url,
        }


@pytest.mark.parametrize("parent", ["", "b7ad6b7169203331"])
@pytest.mark.parametrize("fault", [None, "", "the engine is gone"])
@pytest.mark.parametrize("text", ["", "c1", "\u8bf7" * 100, "x" * 20_000])
@pytest.mark.parametrize("number", [0, 127, 128, 1 << 40])
def test_a_span_is_written_as_the_sdk_would_write_it(parent, fault, text, number):
    """Byte by byte what the library's own encoder makes of the same span, once it is read."""
    attributes = {"a.text": text, "a.number": number, "a.ms": 1.25, "a" * 200: "v"}
    trace_id, own_id, parent_id = map(bytes.fromhex, (TRACE, "00000000000000ff", parent))
    own = Span(
        trace_id, own_id, parent_id, bool(parent), "t", SERVER, 1 << 60, 5, attributes, fault
    )
    above_id = bytes.fromhex("00000000000000fe")
    child = replace(own, kind=CLIENT, parent_id=above_id, parent_is_remote=False)

    def context(span_id: bytes, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(TRACE, 16), int.from_bytes(span_id), remote, TraceFlags(1))

    def readable(span: Span) -> ReadableSpan:
        above = context(span.parent_id, remote=span.parent_is_remote) if span.parent_id else None
        return ReadableSpan(
            span.name,
            context=context(span.span_id),
            parent=above,
            resource=Resource.create({"service.name": "kvturn-router"}),
            attributes=span.attributes,
            kind=SpanKind.SERVER if span.kind == SERVER else SpanKind.CLIENT,
            status=Status(StatusCode.UNSET if fault is None else StatusCode.ERROR, fault),
            start_time=span.began_ns,
            end_time=span.ended_ns,
            instrumentation_scope=InstrumentationScope("kvturn.router"),
        )

    assert export_of([span_bytes(own), span_bytes(child)]) == encode_spans(
        [readable(own), readable(child)]
    )


async def test_fifty_turns_at_once_keep_their_traces_apart():
    """Distinct contexts, none, malformed and unsampled ones, all at the same time."""
    recording = Recording()

    def context(number: int) -> str | None:
        trace = f"{number + 1:032x}"
        kinds = {1: None, 2: f"00-{trace}-zz-01", 3: f"00-{trace}-00000000000000ff-00"}
        return kinds.get(number % 5, f"00-{trace}-00000000000000ff-01")

    async with router(telemetry=recording.telemetry) as rig:
        sent = [context(number) for number in range(50)]
        await asyncio.gather(
            *(
                rig.post(
                    turn_body(conversation_id=f"c{number}"),
                    headers=[("traceparent", header)] if header else [],
                )
                for number, header in enumerate(sent)
            )
        )
        turns = [span for span in recording.spans() if span.name == "turn"]
        by_id = {told(span)["gen_ai.conversation.id"]: span for span in turns}
        for number in range(50):
            span = by_id.get(f"c{number}")
            if number % 5 == 3:
                assert span is None, "an unsampled trace is not recorded"
                continue
            assert span is not None
            same = span.trace_id.hex() == f"{number + 1:032x}"
            assert same is (number % 5 not in (1, 2))
        for seen in rig.prefill.turns + rig.decode.turns:
            assert seen.header("traceparent") is not None


async def test_without_an_endpoint_the_clients_context_goes_on_as_it_is():
    """No spans of our own; engines still join the client's trace."""
    async with router() as rig:
        await rig.post(turn_body(), headers=[("traceparent", PARENT)])
        await rig.post(turn_body(), headers=[("traceparent", "garbage")])
        assert [seen.header("traceparent") for seen in rig.decode.turns] == [PARENT, None]
        assert rig.prefill.turns[0].json["kv_transfer_params"]["kvturn"] == {"traceparent": PARENT}


@pytest.mark.parametrize(
    ("header", "known"),
    [
        (PARENT, True),
        (PARENT.replace("00-", "01-", 1) + "-more", True),
        (PARENT + "-more", False),
        (PARENT.replace("00-", "ff-", 1), False),
        (PARENT.upper(), False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        ("", False),
        (None, False),
    ],
)
def test_trace_contexts_are_read_as_the_standard_says(header, known):
    """Malformed ones are as if they had not been sent."""
    assert (trace_context(header) is not None) is known


async def test_a_client_that_leaves_marks_its_turn_and_nothing_is_logged(caplog):
    """Each turn span ends once, as failed; no warning of the SDK, no detached context."""
    recording = Recording()

    async def play(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event(chunk({"content": "The"}))
        await seen.gone.wait()

    with caplog.at_level(logging.WARNING):
        async with router(telemetry=recording.telemetry) as rig:
            rig.decode.script(CHAT, play)
            for number in range(20):
                client = await rig.client()
                body = turn_body(stream=True, conversation_id=f"c{number}")
                await client.send("POST", CHAT, json.dumps(body).encode())
                await client.head()
                client.close()
            await rig.until(lambda: rig.server._forwarder.in_flight == 0)
            turns = [span for span in recording.spans() if span.name == "turn"]
            assert len(turns) == 20
            assert {span.status.message for span in turns} == {"the client is gone"}
    assert not [record for record in caplog.records if "opentelemetry" in record.name]


async def test_no_attribute_is_ever_missing_or_of_another_kind(caplog):
    """A miss, an error and an anonymous turn have the same reuse attributes as a hit."""
    recording = Recording()

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": "no"}, 400)

    with caplog.at_level(logging.WARNING):
        async with router(telemetry=recording.telemetry) as rig:
            await rig.post(turn_body())
            await rig.post(turn_body(n=2))
            await rig.post(turn_body(), headers=[("X-Kvturn-Reuse", "off")])
            rig.prefill.script(CHAT, refuse)
            await rig.post(turn_body())
            turns = [span for span in recording.spans() if span.name == "turn"]
    assert len(turns) == 4
    kinds = {
        "kvturn.verdict": str,
        "kvturn.prompt_tokens": int,
        "kvturn.reused_tokens": int,
        "kvturn.local_tokens": int,
        "kvturn.read_ms": float,
        "kvturn.read_bytes": int,
        "kvturn.lease_id": str,
        "gen_ai.conversation.id": str,
        "gen_ai.usage.input_tokens": int,
    }
    for turn in turns:
        attributes = told(turn)
        assert {name: type(attributes[name]) for name in kinds} == kinds
        assert "capital" not in json.dumps(attributes)
    assert not [record for record in caplog.records if "opentelemetry" in record.name]


async def test_a_collector_that_is_not_there_slows_nothing_and_is_told_once(caplog):
    """A closed port: turns are served, one warning comes, and the shutdown takes its bound."""
    telemetry = Telemetry(OtlpExporter("http://127.0.0.1:1"))
    with caplog.at_level(logging.WARNING):
        async with router(telemetry=telemetry) as rig:
            for _ in range(20):
                assert (await rig.post(turn_body())).status == 200
            async with asyncio.timeout(20):
                while not any("cannot be delivered" in record.message for record in caplog.records):
                    await rig.post(turn_body())
                    await asyncio.sleep(0.05)
        began = time.monotonic()
        await asyncio.to_thread(telemetry.shutdown)
        assert time.monotonic() - began < 2
    warnings = [record for record in caplog.records if "delivered" in record.message]
    assert len(warnings) == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
