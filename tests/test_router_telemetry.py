"""One trace per turn: its spans, its way across processes, and an exporter nobody waits for."""

import asyncio
import json
import logging
import time
from statistics import median
from typing import NamedTuple

import pytest
from awake import ends_within
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from recorded_spans import Recording, export_of, otlp_tracing, told
from router_harness import FakeLease, Rig, router, turn_body
from stub_engine import CHAT, Reply, Seen, chunk

from kvturn import otlp_export
from kvturn.otlp import PROTOCOLS
from kvturn.span_wire import CLIENT, INTERNAL, SERVER, Attributes, attribute_bytes, span_bytes
from kvturn.trace_context import trace_context
from kvturn.v1 import lease_pb2

TTFC = "gen_ai.response.time_to_first_chunk"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"

UNSAMPLED = PARENT[:-1] + "0"


class EndedSpan(NamedTuple):
    """What `span_bytes` is told."""

    name_bytes: bytes
    parent_id: bytes
    parent_is_remote: bool
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: Attributes
    written: bytes
    fault: str | None
    link: bytes


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

    async with router(tracing=recording.tracing) as rig:
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
    async with router(lease=FakeLease(lease_id="inc.1.1"), tracing=recording.tracing) as rig:
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
        first_chunk_s = told(spans["decode"])[TTFC]
        assert isinstance(first_chunk_s, float)
        assert 0 < first_chunk_s < told(turn)[TTFC]
        for name, url in (("prefill", prefill_url), ("decode", decode_url)):
            place = told(spans[name])
            place.pop(TTFC, None)
            assert place == {
                f"kvturn.{name}.engine": url,
                "server.address": "127.0.0.1",
                "server.port": int(url.rpartition(":")[2]),
                "http.response.status_code": 200,
            }
        assert told(spans["resolve"]) == {"kvturn.lease_id": "inc.1.1", "kvturn.verdict": ""}
        assert told(spans["plan"]) == {"kvturn.plan": "pull"}
        assert told(turn) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.stream": True,
            "gen_ai.response.time_to_first_chunk": told(turn)[TTFC],
            "http.response.status_code": 200,
            "gen_ai.conversation.id": "c1",
            "gen_ai.request.model": "m",
            "gen_ai.response.model": "m",
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
@pytest.mark.parametrize("linked", [False, True])
def test_a_span_is_written_as_the_sdk_would_write_it(parent, fault, text, number, linked):
    """Byte by byte what the library's own encoder makes of the same span, once it is read."""
    attributes = {
        "a.text": text,
        "a.number": number,
        "a.ms": 1.25,
        "a" * 200: "v",
        "a.yes": True,
        "a.no": False,
        "a.one": 1,
        "a.zero": 0,
    }
    common: dict[str, str | int] = {"z.text": text, "z.number": number}
    trace_id, own_id, parent_id = map(bytes.fromhex, (TRACE, "00000000000000ff", parent))
    link = bytes.fromhex("ff" * 16 + "00000000000000fd") if linked else b""
    own = EndedSpan(
        *(trace_id + own_id, parent_id, bool(parent), "t", SERVER, 1 << 60, 5),
        *(attributes, attribute_bytes(common), fault, link),
    )
    above_id = bytes.fromhex("00000000000000fe")
    child = own._replace(kind=CLIENT, parent_id=above_id, parent_is_remote=False)
    part = child._replace(kind=INTERNAL)

    def context(span_id: bytes, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(TRACE, 16), int.from_bytes(span_id), remote, TraceFlags(1))

    links = [Link(SpanContext((1 << 128) - 1, 0xFD, is_remote=True))] if linked else []

    def readable(span: EndedSpan) -> ReadableSpan:
        above = context(span.parent_id, remote=span.parent_is_remote) if span.parent_id else None
        return ReadableSpan(
            span.name,
            context=context(span.name_bytes[16:]),
            parent=above,
            resource=Resource.create({"service.name": "kvturn-router"}),
            attributes={**span.attributes, **common},
            kind=SpanKind(span.kind - 1),
            links=links,
            status=Status(StatusCode.UNSET if fault is None else StatusCode.ERROR, fault),
            start_time=span.began_ns,
            end_time=span.ended_ns,
            instrumentation_scope=InstrumentationScope("kvturn-router"),
        )

    spans = (own, child, part)
    written = [span_bytes(*span) for span in spans]
    assert export_of(written) == encode_spans(list(map(readable, spans)))


async def test_fifty_turns_at_once_keep_their_traces_apart():
    """Distinct contexts, none, malformed and unsampled ones, all at the same time."""
    recording = Recording()

    def context(number: int) -> str | None:
        trace = f"{number + 1:032x}"
        kinds = {1: None, 2: f"00-{trace}-zz-01", 3: f"00-{trace}-00000000000000ff-00"}
        return kinds.get(number % 5, f"00-{trace}-00000000000000ff-01")

    async with router(tracing=recording.tracing) as rig:
        sent = [context(number) for number in range(50)]
        await asyncio.gather(
            *(
                rig.post(
                    turn_body(
                        conversation_id=f"c{number}",
                        messages=[{"role": "user", "content": str(number)}],
                    ),
                    headers=[("traceparent", header)] if header else [],
                )
                for number, header in enumerate(sent)
            )
        )
        turns = [span for span in recording.spans() if span.name == "turn"]
        by_id = {told(span)["gen_ai.conversation.id"]: span.trace_id.hex() for span in turns}
        for number in range(50):
            trace = by_id.get(f"c{number}")
            if number % 5 == 3:
                assert trace is None, "an unsampled trace is not recorded"
                continue
            assert trace is not None
            same = trace == f"{number + 1:032x}"
            assert same is (number % 5 not in (1, 2))
        for engine in (rig.prefill, rig.decode):
            legs = {int(seen.json["messages"][0]["content"]): seen for seen in engine.turns}
            assert sorted(legs) == list(range(50))
            for number, seen in legs.items():
                context_seen = trace_context(seen.header("traceparent"))
                assert context_seen is not None
                assert context_seen.sampled is (number % 5 != 3)
                # One that is not recorded is the client's own.
                assert context_seen.trace_id == by_id.get(f"c{number}", f"{number + 1:032x}")


@pytest.mark.parametrize("traceparent", [None, "garbage", PARENT.upper()])
async def test_vendors_state_of_a_trace_that_is_not_known_is_dropped(traceparent):
    """As the standard says: without a traceparent that can be read, tracestate belongs to none."""
    async with router() as rig:
        context = [("traceparent", traceparent)] if traceparent else []
        await rig.post(turn_body(), headers=[*context, ("tracestate", "a=b")])
        for seen in (rig.prefill.turns[0], rig.decode.turns[0]):
            assert seen.header("traceparent") is None
            assert seen.header("tracestate") is None


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
        async with router(tracing=recording.tracing) as rig:
            rig.decode.script(CHAT, play)
            for number in range(100):
                client = await rig.client()
                body = turn_body(stream=True, conversation_id=f"c{number}")
                await client.send("POST", CHAT, json.dumps(body).encode())
                await client.head()
                client.close()
            await rig.until(lambda: rig.server._forwarder.in_flight == 0)
            turns = [span for span in recording.spans() if span.name == "turn"]
            assert len({span.span_id for span in turns}) == len(turns) == 100
            assert {span.status.message for span in turns} == {"the client is gone"}
    assert not [record for record in caplog.records if "opentelemetry" in record.name]


async def test_no_attribute_is_ever_missing_or_of_another_kind(caplog):
    """A miss, an error and an anonymous turn have the same reuse attributes as a hit."""
    recording = Recording()

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": "no"}, 400)

    with caplog.at_level(logging.WARNING):
        async with router(tracing=recording.tracing) as rig:
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_collector_that_is_not_there_slows_nothing_and_is_told_once(
    protocol, caplog, monkeypatch
):
    """A closed port: turns take what others take, one warning comes, the shutdown its bound."""
    monkeypatch.setattr(otlp_export, "EXPORT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(otlp_export, "_PAUSE_S", 0.1)
    tracing = otlp_tracing("http://127.0.0.1:1", protocol)

    async def time_of_turn(rig: Rig) -> float:
        began_s = time.perf_counter()
        assert (await rig.post(turn_body())).status == 200
        return time.perf_counter() - began_s

    with caplog.at_level(logging.WARNING):
        async with router(tracing=tracing) as rig, router(tracing=Recording().tracing) as control:
            took = [[await time_of_turn(each) for each in (rig, control)] for _ in range(31)]
            dead_s, control_s = map(median, zip(*took, strict=True))
            assert dead_s < 3 * control_s  # In turn and on one machine: its load is the same.
            async with asyncio.timeout(20):
                while not any("cannot be delivered" in record.message for record in caplog.records):
                    await rig.post(turn_body())
                    await asyncio.sleep(0.05)
        assert await asyncio.to_thread(ends_within, 2, tracing.shutdown)
    warnings = [record for record in caplog.records if "delivered" in record.message]
    assert len(warnings) == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_turn_links_to_the_one_before_it_and_its_report_names_its_trace():
    """Without a lease service too; the conversation's turns are told with their traces."""
    recording = Recording()
    async with router(tracing=recording.tracing) as rig:
        for _ in range(3):
            await rig.post(turn_body(conversation_id="c1"))
        await rig.post(turn_body(conversation_id="c2"))
        answer = await rig.ask("GET", "/kvturn/v1/conversations/c1?model=m", b"", ())
        turns = [span for span in recording.spans() if span.name == "turn"]
    by_id = [span for span in turns if told(span)["gen_ai.conversation.id"] == "c1"]
    linked = [[(link.trace_id, link.span_id) for link in span.links] for span in by_id]
    names = [(span.trace_id, span.span_id) for span in by_id]
    assert linked == [[], names[:1], names[1:2]]
    (other,) = [span for span in turns if span not in by_id]
    assert not other.links
    reported = [turn["trace_id"] for turn in json.loads(answer.body)["turns"]]
    assert reported == [span.trace_id.hex() for span in by_id]


async def test_a_lease_service_is_told_the_trace_and_tells_what_to_link_to():
    """Ids as the spans have them; a turn that is not recorded tells of none."""
    recording = Recording()
    lease = FakeLease()
    async with router(lease=lease, tracing=recording.tracing) as rig:
        previous = lease_pb2.TurnTrace(trace_id=b"t" * 16, span_id=b"s" * 8)
        lease.previous = previous
        await rig.post(turn_body(conversation_id="c1"))
        await rig.post(turn_body(conversation_id="c1"), headers=[("traceparent", UNSAMPLED)])
        spans = {span.name: span for span in recording.spans()}
        turn, asked = lease.begun
    assert turn.trace.trace_id == spans["turn"].trace_id
    assert turn.trace.span_id == spans["turn"].span_id
    assert turn.trace.parent_span_id == spans["resolve"].span_id
    (link,) = spans["turn"].links
    assert (link.trace_id, link.span_id) == (previous.trace_id, previous.span_id)
    assert not asked.HasField("trace")


CANARY = "xylophone-canary"


async def test_no_word_of_a_prompt_or_an_answer_and_no_key_is_in_a_span():
    """Prompts, tools, answers, keys, engines' errors that repeat the prompt: none is exported."""
    recording = Recording()

    async def repeat(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": f"bad: {seen.json['messages']}"}}, 400)

    async def garble(seen: Seen, reply: Reply) -> None:
        await reply.json({"choices": [{"message": {"content": CANARY}}], "usage": CANARY})

    body = turn_body(
        conversation_id="c1",
        messages=[{"role": "user", "content": CANARY}],
        tools=[{"type": "function", "function": {"name": CANARY}}],
        user=CANARY,
    )
    key = [("authorization", f"Bearer {CANARY}"), ("x-request-id", CANARY)]
    async with router(lease=FakeLease(lease_id="inc.1.1"), tracing=recording.tracing) as rig:
        await rig.post(body, headers=key)
        rig.decode.script(CHAT, garble)
        await rig.post(body, headers=key)
        rig.decode.script(CHAT, repeat)
        await rig.post(body, headers=key)
        rig.prefill.script(CHAT, repeat)
        assert (await rig.post(body, headers=key)).status == 400
        assert len([span for span in recording.spans() if span.name == "turn"]) == 4
        points = [point for turn in rig.lease.begun for point in turn.points]
    exported = b"".join(recording.exported)
    assert points
    for secret in (CANARY.encode(), *points, *(point.hex().encode() for point in points)):
        assert secret not in exported
