"""A turn's report as a message, for gRPC clients and the lease service, and back."""

from typing import Final, cast

from google.protobuf import duration_pb2

from kvturn.v1 import common_pb2, lease_pb2, router_pb2
from kvturn_router.leases.lease_client import proto_verdict, verdict_of
from kvturn_router.request.conversation import (
    ConversationEntry,
    ConversationView,
    HeldRetention,
    TurnReport,
)
from kvturn_router.verdict import Verdict

VERDICTS: Final = {verdict: proto_verdict(verdict) for verdict in Verdict}
PLANS: Final = {
    name.removeprefix("PLAN_KIND_").lower(): cast("common_pb2.PlanKind", number)
    for name, number in common_pb2.PlanKind.items()
    if number != common_pb2.PLAN_KIND_UNSPECIFIED
}


def report_message(conversation_id: str, report: TurnReport) -> common_pb2.TurnReport:
    """Returns the message of a report. What is not known is absent."""
    return common_pb2.TurnReport(
        conversation_id=conversation_id,
        turn=report.turn,
        verdict=VERDICTS[report.verdict],
        prompt_tokens=report.prompt_tokens,
        reused_tokens=report.reused_tokens,
        local_tokens=report.local_tokens,
        prefill_time=duration(report.prefill_ms),
        read_time=duration(report.read_ms),
        read_bytes=report.read_bytes,
        output_tokens=report.output_tokens,
        prefill_engine=report.prefill_engine,
        decode_engine=report.decode_engine,
        plan=PLANS.get(report.plan),
        first_byte_time=duration(report.first_byte_ms) if report.first_byte_ms else None,
        plan_reason=report.plan_reason,
        total_time=duration(report.total_ms) if report.total_ms else None,
        age=None if report.age_ms is None else duration(report.age_ms),
        saved_time=None if report.saved_ms is None else duration(report.saved_ms),
        trace_id=report.trace_id,
    )


def report_of(message: common_pb2.TurnReport) -> TurnReport:
    """Returns the report that a message is of; a plan or verdict of tomorrow is none."""
    return TurnReport(
        turn=message.turn,
        verdict=verdict_of(message.verdict) or Verdict.NOT_OFFERED,
        prompt_tokens=message.prompt_tokens,
        reused_tokens=message.reused_tokens,
        local_tokens=message.local_tokens,
        prefill_ms=_milliseconds(message.prefill_time),
        read_ms=_milliseconds(message.read_time),
        read_bytes=message.read_bytes,
        plan=_plan_word(message.plan),
        first_byte_ms=_milliseconds(message.first_byte_time),
        output_tokens=message.output_tokens,
        prefill_engine=message.prefill_engine,
        decode_engine=message.decode_engine,
        plan_reason=message.plan_reason,
        total_ms=_milliseconds(message.total_time),
        age_ms=_milliseconds(message.age) if message.HasField("age") else None,
        saved_ms=_milliseconds(message.saved_time) if message.HasField("saved_time") else None,
        trace_id=message.trace_id,
    )


def view_of(message: lease_pb2.ListTurnsResponse) -> ConversationView:
    """Returns what the lease service knows of a conversation."""
    return ConversationView(
        [(report.conversation_id, report_of(report)) for report in message.turns],
        [
            HeldRetention(
                lease.conversation.conversation_id,
                lease.engine_id,
                lease.token_count,
                lease.state == lease_pb2.Lease.STATE_READING,
                _milliseconds(lease.idle_in) / 1000 if lease.HasField("idle_in") else None,
            )
            for lease in message.leases
        ],
    )


def entry_of(message: lease_pb2.Conversation) -> ConversationEntry:
    """Returns what the lease service tells of a conversation in a list."""
    key = message.key
    return ConversationEntry(
        tenant=key.tenant,
        model=key.model,
        conversation_id=key.conversation_id,
        turns=message.turns,
        turns_in_flight=message.turns_in_flight,
        quiet_s=(
            _milliseconds(message.quiet_for) / 1000 if message.HasField("quiet_for") else None
        ),
        engine_id=message.engine_id,
        held_tokens=message.token_count,
        latest_turn=report_of(message.latest_turn) if message.HasField("latest_turn") else None,
    )


def held_message(held: HeldRetention) -> router_pb2.HeldRetention:
    """Returns the message of what is held."""
    return router_pb2.HeldRetention(
        conversation_id=held.conversation_id,
        engine_id=held.engine_id,
        token_count=held.token_count,
        being_read=held.being_read,
        kept=None if held.kept_s is None else duration(held.kept_s * 1000),
    )


def duration(milliseconds: float) -> duration_pb2.Duration:
    """Returns so many milliseconds, to the microsecond."""
    seconds, microseconds = divmod(round(milliseconds * 1000), 1_000_000)
    return duration_pb2.Duration(seconds=seconds, nanos=microseconds * 1000)


def _milliseconds(message: duration_pb2.Duration) -> float:
    return message.ToMicroseconds() / 1000


def _plan_word(number: int) -> str:
    return next((word for word, known in PLANS.items() if known == number), "")
