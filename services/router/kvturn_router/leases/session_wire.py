"""What a router's session says of turns, in wire form.

The library takes 30 us a turn to make these messages. Field numbers are those of
kvturn/v1/lease.proto and common.proto.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Final

from kvturn.proto_wire import field, varint
from kvturn.tracing import Span
from kvturn_router.leases.turn_report import PLANS, VERDICTS
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

_UINT32_MAX: Final = (1 << 32) - 1
_UINT64_MAX: Final = (1 << 64) - 1
_WRITTEN_MAX: Final = 4_096
"""Parts that are kept as they were written, the least recently used forgotten first."""


def session_request(begins: Iterable[bytes], ends: Iterable[bytes], hello: bytes = b"") -> bytes:
    """Returns a RouterSessionRequest of BeginTurns and EndTurns."""
    parts = [field(b"\x0a", hello)] if hello else []
    parts += [field(b"\x12", begin) for begin in begins]
    parts += [field(b"\x1a", end) for end in ends]
    return b"".join(parts)


def router_hello(router_id: str, turns_in_flight: Iterable[bytes], version: str = "") -> bytes:
    """Returns a RouterHello; the turns are BeginTurns."""
    turns = b"".join([field(b"\x12", begin) for begin in turns_in_flight])
    said = field(b"\x1a", version.encode()) if version else b""
    return field(b"\x0a", router_id.encode()) + turns + said


def begin_turn(
    turn_id: int,
    key: ConversationKey,
    *,
    recognise: bool,
    points: Sequence[bytes],
    wait_ms: int,
    reuse: bool,
    number: int = 0,
    trace: bytes = b"",
) -> bytes:
    """Returns a BeginTurn. Points have 16 bytes each; nothing is said of a wait of 0.

    `number` is the turn's, where an earlier session gave it one, `trace` what
    `turn_trace` returned, empty if the turn is not recorded.
    """
    conversation = _owner(key.tenant, key.model) + field(b"\x1a", key.conversation_id.encode())
    return b"".join(
        (
            b"\x08" + varint(turn_id),
            field(b"\x12", conversation),
            b"\x18\x01" if recognise else b"",
            b"\x22\x10" + b"\x22\x10".join(points) if points else b"",
            _wait(wait_ms) if wait_ms else b"",
            b"\x30\x01" if reuse else b"",
            _number(b"\x38", number),
            trace,
        )
    )


def turn_trace(turn: Span, asking: Span) -> bytes:
    """Returns a BeginTurn's trace, tag and length included, of two spans of one trace.

    `turn` is the turn's, `asking` that under which the lease service is asked; empty if they are
    not recorded.
    """
    own = turn.name_bytes
    if not own:
        return b""
    ids = (own[:16], own[16:], asking.name_bytes[16:])
    return b"\x42\x26\x0a\x10%b\x12\x08%b\x1a\x08%b" % ids


def end_turn(turn_id: int, *, retains: bool, report: bytes | None) -> bytes:
    """Returns an EndTurn; `report` is a TurnReport."""
    return b"".join(
        (
            b"\x08" + varint(turn_id),
            b"\x10\x01" if retains else b"",
            b"" if report is None else field(b"\x1a", report),
        )
    )


def turn_report(conversation_id: str, report: TurnReport) -> bytes:
    """Returns a TurnReport, the same as turn_report.py's message; the turn has just ended."""
    return b"".join(
        (
            field(b"\x0a", conversation_id.encode()),
            _served(report.verdict, report.plan, report.prefill_engine, report.decode_engine),
            _number(b"\x10", report.turn),
            _number(b"\x20", report.prompt_tokens),
            _number(b"\x28", report.reused_tokens),
            _number(b"\x30", report.local_tokens),
            _duration(b"\x3a", report.prefill_ms),
            _duration(b"\x42", report.read_ms),
            _number(b"\x48", report.read_bytes, _UINT64_MAX),
            _duration(b"\x5a", report.first_byte_ms) if report.first_byte_ms else b"",
            _number(b"\x60", report.output_tokens),
            _name(b"\x7a", report.plan_reason),
            _duration(b"\x92\x01", report.total_ms) if report.total_ms else b"",
            b"" if report.saved_ms is None else _duration(b"\x82\x01", report.saved_ms),
            _name(b"\x8a\x01", report.trace_id),
        )
    )


def _number(tag: bytes, number: int, most: int = _UINT32_MAX) -> bytes:
    # Engines tell some of them, and one that is out of range would end the session.
    return tag + varint(min(number, most)) if number > 0 else b""


@functools.lru_cache(_WRITTEN_MAX)
def _served(verdict: Verdict, plan: str, prefill_engine: str, decode_engine: str) -> bytes:
    # Most turns are served as turns before them were.
    return b"".join(
        (
            _number(b"\x18", VERDICTS[verdict]),
            _number(b"\x50", PLANS.get(plan, 0)),
            _name(b"\x6a", prefill_engine),
            _name(b"\x72", decode_engine),
        )
    )


@functools.lru_cache(16)  # it is a setting
def _wait(wait_ms: int) -> bytes:
    return _duration(b"\x2a", wait_ms)


@functools.lru_cache(_WRITTEN_MAX)
def _owner(tenant: str, model: str) -> bytes:
    return _name(b"\x0a", tenant) + _name(b"\x12", model)


def _name(tag: bytes, name: str) -> bytes:
    return field(tag, name.encode()) if name else b""


def _duration(tag: bytes, milliseconds: float) -> bytes:
    # A Duration, to the microsecond.
    if not milliseconds:
        return tag + b"\x00"
    seconds, microseconds = divmod(round(milliseconds * 1000), 1_000_000)
    return field(tag, _number(b"\x08", seconds) + _number(b"\x10", microseconds * 1000))
