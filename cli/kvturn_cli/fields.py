"""What the lease service tells, as plain fields: those of --json, which tables are made of too.

Field names are stable; cli/README.md lists them. Times are in seconds (`_s`) or milliseconds
(`_ms`), sizes in tokens, blocks or bytes. None stands for what is not known or is not there.
"""

from typing import Any, TypeAlias

from kvturn.v1 import common_pb2, lease_pb2

Fields: TypeAlias = dict[str, Any]


def conversation_fields(message: lease_pb2.Conversation) -> Fields:
    """Returns the fields of a conversation in a list."""
    latest = message.latest_turn
    return {
        **_name(message.key),
        "turns": message.turns,
        "turns_in_flight": message.turns_in_flight,
        "quiet_s": _seconds(message, "quiet_for"),
        "engine_id": message.engine_id,
        "retained_tokens": message.token_count,
        "retained_blocks": message.block_count,
        "leases": message.lease_count,
        "idle_in_s": _seconds(message, "idle_in"),
        "latest_turn": turn_fields(latest) if message.HasField("latest_turn") else None,
    }


def turn_fields(message: common_pb2.TurnReport) -> Fields:
    """Returns the fields of a turn, as a router reported it."""
    computed = message.prompt_tokens - message.reused_tokens - message.local_tokens
    return {
        "conversation_id": message.conversation_id,
        "turn": message.turn,
        "verdict": word(common_pb2.Verdict, message.verdict),
        "plan": word(common_pb2.PlanKind, message.plan),
        "plan_reason": message.plan_reason,
        "prompt_tokens": message.prompt_tokens or None,
        "reused_tokens": message.reused_tokens,
        "local_tokens": message.local_tokens,
        "computed_tokens": max(computed, 0) if message.prompt_tokens else None,
        "output_tokens": message.output_tokens or None,
        "first_byte_ms": _milliseconds(message, "first_byte_time"),
        "total_ms": _milliseconds(message, "total_time"),
        "prefill_ms": _milliseconds(message, "prefill_time"),
        "read_ms": _milliseconds(message, "read_time"),
        "read_bytes": message.read_bytes,
        "saved_ms": _milliseconds(message, "saved_time"),
        "prefill_engine": message.prefill_engine,
        "decode_engine": message.decode_engine,
        "trace_id": message.trace_id,
        "age_s": _seconds(message, "age"),
    }


def lease_fields(message: lease_pb2.Lease) -> Fields:
    """Returns the fields of a lease."""
    return {
        "lease_id": message.lease_id,
        **_name(message.conversation),
        "engine_id": message.engine_id,
        "state": word(lease_pb2.Lease.State, message.state),
        "release_reason": word(common_pb2.ReleaseReason, message.release_reason),
        "tokens": message.token_count,
        "blocks": message.block_count,
        "age_s": _seconds(message, "age"),
        "idle_in_s": _seconds(message, "idle_in"),
        "reading_for_s": _seconds(message, "reading_for"),
    }


def engine_fields(message: lease_pb2.Engine) -> Fields:
    """Returns the fields of an engine."""
    about, memory = message.description, message.memory
    told = memory.total_blocks > 0  # else it has not told it
    active = memory.total_blocks - memory.retained_blocks - memory.free_blocks
    return {
        "engine_id": about.engine_id,
        "role": word(common_pb2.EngineRole, about.role),
        "http_address": about.http_address,
        "model": about.model,
        "blocks": memory.total_blocks if told else about.kv_blocks or None,
        "active_blocks": max(active, 0) if told else None,
        "retained_blocks": memory.retained_blocks if told else None,
        "free_blocks": memory.free_blocks if told else None,
        "block_size": about.block_size,
        "leases": message.lease_count,
        "vllm_version": about.vllm_version,
        "connector_version": about.connector_version,
        "session": message.session_number,
        "heartbeat_age_s": _seconds(message, "last_heartbeat_age"),
        "expired_sessions": message.expired_session_count,
        "last_expiry_age_s": _seconds(message, "last_expiry_age"),
        "draining": message.draining,
    }


def word(enum: Any, number: int) -> str:
    """Returns the word of an enum's number: "reused" of VERDICT_REUSED, "" of an unset one."""
    value = enum.DESCRIPTOR.values_by_number.get(number)
    if value is None:
        return f"unknown {number}"  # of a lease service that is newer
    if number == 0:
        return ""
    first = str(enum.DESCRIPTOR.values_by_number[0].name)
    return str(value.name).removeprefix(first.removesuffix("UNSPECIFIED")).lower()


def _name(key: common_pb2.ConversationKey) -> Fields:
    return {
        "conversation_id": key.conversation_id,
        "tenant": key.tenant,
        "model": key.model,
    }


def _seconds(message: Any, field: str) -> float | None:
    return getattr(message, field).ToMicroseconds() / 1e6 if message.HasField(field) else None


def _milliseconds(message: Any, field: str) -> float | None:
    return getattr(message, field).ToMicroseconds() / 1e3 if message.HasField(field) else None
