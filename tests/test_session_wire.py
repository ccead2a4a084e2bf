"""What a router's session says is written as the library itself would write it."""

import logging

import hypothesis.strategies as st
import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from recorded_spans import Recording

from kvturn.span_export import SpanQueue
from kvturn.span_wire import SERVER
from kvturn.tracing import UNRECORDED, Span, Tracer
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.choice.plan import PlanKind
from kvturn_router.leases.session_wire import (
    begin_turn,
    end_turn,
    router_hello,
    session_request,
    turn_report,
    turn_trace,
)
from kvturn_router.leases.turn_report import report_message
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

names = st.text(st.characters(codec="utf-8"), max_size=300)
counts = st.integers(0, (1 << 32) - 1)
durations_ms = st.floats(0, 1e8, allow_subnormal=False)
reports = st.builds(
    TurnReport,
    counts,
    st.sampled_from(Verdict),
    counts,
    counts,
    counts,
    durations_ms,
    durations_ms,
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(["", *PlanKind]),
    durations_ms,
    counts,
    names,
    names,
    names,
    durations_ms,
    st.none() | durations_ms,
    st.sampled_from(["", "0af7651916cd43dd8448eb211c80319c"]),
)


@given(names, reports)
def test_a_report_is_the_message_that_the_library_makes(conversation_id, report):
    """Every field, of any size, known or not."""
    written = common_pb2.TurnReport.FromString(turn_report(conversation_id, report))
    assert written == report_message(conversation_id, report)
    ended = lease_pb2.EndTurn(turn_id=7, retains=True, report=written)
    told = end_turn(7, retains=True, report=turn_report(conversation_id, report))
    assert lease_pb2.EndTurn.FromString(told) == ended


def traced_turn(byte: bytes) -> tuple[Span, lease_pb2.TurnTrace]:
    """Returns a turn's span, whose ids and those of its children are all of one byte."""
    tracer = Tracer(SpanQueue(Recording(), logging.getLogger("kvturn.test")))
    tracer.bits = lambda bits: int.from_bytes(byte * (bits // 8))
    span = tracer.root("turn", SERVER, byte * 16)
    ids = lease_pb2.TurnTrace(trace_id=byte * 16, span_id=byte * 8, parent_span_id=byte * 8)
    return span, ids


@given(
    turn_id=st.integers(1, (1 << 64) - 1),
    key=st.builds(ConversationKey, names, names, names),
    recognise=st.booleans(),
    points=st.lists(st.binary(min_size=16, max_size=16), max_size=20),
    wait_ms=st.integers(0, 5_000),
    reuse=st.booleans(),
    number=counts,
    traced=st.booleans(),
)
def test_a_turn_begins_with_the_message_that_the_library_makes(
    turn_id, key, recognise, points, wait_ms, reuse, number, traced
):
    """With and without all that may be absent; in a message of its kind and in the first one."""
    turn, ids = traced_turn(b"\x07") if traced else (UNRECORDED, None)
    begin = begin_turn(
        turn_id,
        key,
        recognise=recognise,
        points=points,
        wait_ms=wait_ms,
        reuse=reuse,
        number=number,
        trace=turn_trace(turn, turn.child("resolve")),
    )
    wait = duration_pb2.Duration()
    wait.FromMilliseconds(wait_ms)
    message = lease_pb2.BeginTurn(
        turn_id=turn_id,
        conversation=common_pb2.ConversationKey(
            tenant=key.tenant, model=key.model, conversation_id=key.conversation_id
        ),
        recognise=recognise,
        points=points,
        wait=wait if wait_ms else None,
        reuse=reuse,
        turn=number,
        trace=ids,
    )
    bare = lease_pb2.EndTurn(turn_id=3)
    request = session_request(
        [begin, begin],
        [end_turn(3, retains=False, report=None)],
        router_hello("r1", [begin], "1.2.3"),
    )
    assert lease_pb2.RouterSessionRequest.FromString(request) == lease_pb2.RouterSessionRequest(
        hello=lease_pb2.RouterHello(router_id="r1", turns_in_flight=[message], version="1.2.3"),
        begin_turns=[message, message],
        end_turns=[bare],
    )


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 70])
def test_a_number_that_an_engine_made_up_breaks_no_message(number):
    """It is told as 0 or the most there is; the session goes on."""
    report = TurnReport(1, Verdict.REUSED, number, 0, 0, 0.0, float(number), number)
    told = common_pb2.TurnReport.FromString(turn_report("c", report))
    assert told.turn == 1
    assert told.prompt_tokens == max(0, min(number, (1 << 32) - 1))
    assert told.read_bytes == max(0, min(number, (1 << 64) - 1))
