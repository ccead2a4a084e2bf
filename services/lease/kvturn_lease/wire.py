"""Protobuf messages to the core's values and back; every field that comes in is checked here.

Readers raise InvalidArgument naming the field as the proto does, before anything has changed.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, cast

from google.protobuf.duration_pb2 import Duration

from kvturn.recognition import POINTS_MAX
from kvturn.span_wire import SPAN_NAME_BYTES, TRACE_ID_BYTES
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_lease.config import LONGEST_READ_MAX_NS, SESSION_TTL_MAX_NS, Policy, stretched_ns
from kvturn_lease.conversation import TURNS_IN_FLIGHT_MAX, ConversationKey
from kvturn_lease.conversation_search import Wanted
from kvturn_lease.effects import GrantRefused, HeartbeatAck, Registered, Release
from kvturn_lease.errors import InvalidArgument
from kvturn_lease.lease import LeaseId, Retention
from kvturn_lease.routers import Beginning
from kvturn_lease.session import EngineInfo, KvMemory, SessionId
from kvturn_lease.verdict import ReadOutcome, ReleaseReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvturn_lease.config import LeaseConfig, LessorConfig
    from kvturn_lease.conversation import ConversationView
    from kvturn_lease.effects import SendToEngine
    from kvturn_lease.errors import LeaseServiceError
    from kvturn_lease.lease import LeaseView
    from kvturn_lease.lessor import ReadAnswer, Resolution
    from kvturn_lease.routers import Begun, Retained
    from kvturn_lease.session import EngineView
    from kvturn_lease.turn_reports import KeptReport
    from kvturn_lease.verdict import Verdict

_SECOND_NS = 1_000_000_000

_LEASE_ID = re.compile(r"([^.]+)\.(0|[1-9]\d{0,19})\.([1-9]\d{0,19})", re.ASCII)
LEASE_ID_BYTES_MAX = 128
_INCARNATION_BYTES_MAX = 64
_ENGINE_ID_BYTES_MAX = 128
_ROUTER_ID_BYTES_MAX = 128
_NAME_BYTES_MAX = 64
_NAMES_MAX = 64
_RANKS_MAX = 65_536
_SECRET_CHECK_MAX = 65_535
_SETTINGS_TEXTS = (
    "dtype",
    "kv_cache_dtype",
    "kv_load_failure_policy",
    "kv_buffer_device",
    "nixl_version",
    "machine",
    "network",
)
_REPORT_BYTES_MAX = 4_096
_KEY_PART_BYTES_MAX = 256
_SHORT = _KEY_PART_BYTES_MAX // 4
"""A text of so few characters has at most 256 bytes, and need not be measured."""
_TEXT_BYTES_MAX = 2_048

TOKENS_MAX = 16_777_216
DIGEST_STRIDE_TOKENS = 16
DIGEST_BYTES = 16
_DIGEST_LENGTHS = frozenset((DIGEST_BYTES,))
_GROUPS_MAX = 256
_BLOCK_SIZE_MAX = 65_536
_NUMBER_MAX = 2**63 - 1

PAGE_SIZE_MAX = 1_000
_PAGE_SIZE_DEFAULT = 100
RESOLVE_WAIT_MAX_NS = _SECOND_NS
HOLD_MAX_NS = stretched_ns(SESSION_TTL_MAX_NS + LONGEST_READ_MAX_NS)

_WITHDRAW_REASONS = (ReleaseReason.PRESSURE, ReleaseReason.EXPIRED, ReleaseReason.SUPERSEDED)
_FREED_REASONS = (ReleaseReason.CONSUMED, ReleaseReason.EXPIRED)

# ---- single values ---------------------------------------------------------------------------


def _check(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise InvalidArgument(field, problem)


def _check_text(text: str, field: str, least: int, most: int) -> None:
    # A character takes 1 to 4 bytes, so most texts need not be encoded to be measured.
    fits = least <= len(text) and (4 * len(text) <= most or len(text.encode()) <= most)
    _check(fits, field, f"must be {least} to {most} bytes")


def _check_shown(text: str, field: str, least: int, most: int) -> None:
    """Checks a text that is shown in logs, where it must not pass for lines of its own."""
    _check_text(text, field, least, most)
    _check(text.isprintable(), field, "must have printable characters only")


def span_ns(span: Duration, field: str) -> int:
    """Reads a span of 0 or more. Raises InvalidArgument."""
    seconds, nanos = span.seconds, span.nanos
    fits = 0 <= seconds <= 315_576_000_000 and 0 <= nanos < _SECOND_NS
    _check(fits, field, "must be a duration of 0 or more")
    return seconds * _SECOND_NS + nanos


def duration(span_in_ns: int) -> Duration:
    """Writes a span."""
    seconds, nanos = divmod(span_in_ns, _SECOND_NS)
    return Duration(seconds=seconds, nanos=nanos)


def lease_id(text: str, field: str = "lease_id") -> LeaseId:
    """Reads "<incarnation>.<retention number>.<session number>". Raises InvalidArgument."""
    match = _LEASE_ID.fullmatch(text) if len(text) <= LEASE_ID_BYTES_MAX else None
    if match is None or len(match[1].encode()) > _INCARNATION_BYTES_MAX:
        raise InvalidArgument(
            field,
            "must be a lease as `kvturn leases` tells it,"
            ' "<incarnation>.<retention number>.<session number>"',
        )
    return LeaseId(match[1], int(match[2]), int(match[3]))


def conversation_key(message: common_pb2.ConversationKey, field: str) -> ConversationKey:
    """Reads a conversation's name. Raises InvalidArgument."""
    tenant, model, named = message.tenant, message.model, message.conversation_id
    if not (len(tenant) <= _SHORT and 0 < len(model) <= _SHORT and 0 < len(named) <= _SHORT):
        _check_text(tenant, f"{field}.tenant", 0, _KEY_PART_BYTES_MAX)
        _check_text(model, f"{field}.model", 1, _KEY_PART_BYTES_MAX)
        _check_text(named, f"{field}.conversation_id", 1, _KEY_PART_BYTES_MAX)
    # Many conversations share these two texts; interned, each is in memory once.
    return ConversationKey(sys.intern(tenant), sys.intern(model), named)


# ---- what engines send -----------------------------------------------------------------------


def session_id(request: lease_pb2.EngineSessionRequest) -> SessionId:
    """Reads the session that a Register opens, and checks the engine's description.

    Raises InvalidArgument.
    """
    _check(request.WhichOneof("message") == "register", "message", "must be register at first")
    _check(
        1 <= request.session_number <= _NUMBER_MAX,
        "session_number",
        "must be 1 to 2^63-1",
    )
    _check(request.sequence == 1, "sequence", "must be 1 for register")
    _check(request.register.HasField("engine"), "register.engine", "must be set")
    engine = request.register.engine
    field = "register.engine"
    _check_shown(engine.engine_id, f"{field}.engine_id", 1, _ENGINE_ID_BYTES_MAX)
    _check_shown(engine.incarnation, f"{field}.incarnation", 1, _INCARNATION_BYTES_MAX)
    _check("." not in engine.incarnation, f"{field}.incarnation", 'must not contain "."')
    return SessionId(engine.engine_id, engine.incarnation, request.session_number)


def engine_info(engine: lease_pb2.EngineDescription) -> EngineInfo:
    """Reads what an engine says about itself. Raises InvalidArgument."""
    field = "register.engine"
    roles = (
        common_pb2.ENGINE_ROLE_PREFILL,
        common_pb2.ENGINE_ROLE_DECODE,
        common_pb2.ENGINE_ROLE_BOTH,
    )
    _check(engine.role in roles, f"{field}.role", "must be PREFILL, DECODE or BOTH")
    address = engine.http_address
    _check_shown(address, f"{field}.http_address", 0, _TEXT_BYTES_MAX)
    _check(
        not address or address.startswith(("http://", "https://")),
        f"{field}.http_address",
        "must start with http:// or https://",
    )
    for name in ("model", "vllm_version", "connector_version"):
        _check_text(getattr(engine, name), f"{field}.{name}", 0, _TEXT_BYTES_MAX)
    retains = engine.role != common_pb2.ENGINE_ROLE_PREFILL
    _check(
        engine.HasField("nixl") or not retains,
        f"{field}.nixl",
        "must be set: an engine that decodes is read from",
    )
    if engine.HasField("nixl"):
        _check_nixl(engine.nixl, f"{field}.nixl")
    if engine.HasField("settings"):
        _check_settings(engine.settings, f"{field}.settings")
    return EngineInfo(address, retains, engine.SerializeToString(), engine.nixl.SerializeToString())


def _check_nixl(nixl: common_pb2.NixlAddress, field: str) -> None:
    _check_text(nixl.nixl_engine_id, f"{field}.nixl_engine_id", 1, _TEXT_BYTES_MAX)
    _check_text(nixl.host, f"{field}.host", 1, _TEXT_BYTES_MAX)
    _check(1 <= nixl.port <= 65_535, f"{field}.port", "must be 1 to 65535")
    _check(nixl.tp_size >= 1, f"{field}.tp_size", "must be at least 1")
    _check(nixl.dcp_size >= 1, f"{field}.dcp_size", "must be at least 1")
    _check(nixl.pp_size >= 1, f"{field}.pp_size", "must be at least 1")


def _check_settings(settings: lease_pb2.EngineSettings, field: str) -> None:
    for name in _SETTINGS_TEXTS:
        _check_shown(getattr(settings, name), f"{field}.{name}", 0, _NAME_BYTES_MAX)
    for name in ("nixl_backends", "rdma_devices"):
        items = getattr(settings, name)
        _check(len(items) <= _NAMES_MAX, f"{field}.{name}", f"must be at most {_NAMES_MAX}")
        for index, item in enumerate(items):
            _check_shown(item, f"{field}.{name}[{index}]", 1, _NAME_BYTES_MAX)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        most = _RANKS_MAX
        _check(getattr(settings, name) <= most, f"{field}.{name}", f"must be at most {most}")
    most = _SECRET_CHECK_MAX
    _check(settings.secret_check <= most, f"{field}.secret_check", f"must be at most {most}")
    for name in ("decoder_kv_blocks_ttl", "question_deadline"):
        if settings.HasField(name):
            span_ns(getattr(settings, name), f"{field}.{name}")


def retention(message: common_pb2.Retention, field: str) -> Retention:
    """Reads a retention. Raises InvalidArgument.

    How many blocks it may have is the core's to judge. What only the reader needs stays
    serialized; what the core keeps by itself is left out of it.
    """
    key = conversation_key(message.conversation, f"{field}.conversation")
    _check(
        1 <= message.token_count <= TOKENS_MAX, f"{field}.token_count", f"must be 1 to {TOKENS_MAX}"
    )
    _check(
        1 <= message.block_size <= _BLOCK_SIZE_MAX,
        f"{field}.block_size",
        f"must be 1 to {_BLOCK_SIZE_MAX}",
    )
    _check(
        1 <= len(message.groups) <= _GROUPS_MAX, f"{field}.groups", f"must be 1 to {_GROUPS_MAX}"
    )
    block_count = sum(len(group.block_ids) for group in message.groups)
    _check(block_count > 0, f"{field}.groups", "must hold a block")
    _check_digests(message.digests, message.token_count, f"{field}.digests")
    _check(len(message.history) in (0, DIGEST_BYTES), f"{field}.history", "must be 16 bytes")
    named = lease_id(message.lease_id, f"{field}.lease_id")
    payload = common_pb2.Retention()
    payload.CopyFrom(message)
    payload.ClearField("lease_id")
    payload.ClearField("conversation")
    payload.ClearField("history")
    return Retention(
        named,
        key,
        message.token_count,
        block_count,
        message.turn,
        payload.SerializeToString(),
        message.prompt_tokens,
        message.local_cached_tokens,
        message.history,
    )


def _check_digests(digests: common_pb2.TokenDigests, token_count: int, field: str) -> None:
    _check(
        digests.stride_tokens == DIGEST_STRIDE_TOKENS,
        f"{field}.stride_tokens",
        f"must be {DIGEST_STRIDE_TOKENS}",
    )
    _check(digests.digest_bytes == DIGEST_BYTES, f"{field}.digest_bytes", f"must be {DIGEST_BYTES}")
    points = -(-token_count // DIGEST_STRIDE_TOKENS)
    _check(
        len(digests.values) == points * DIGEST_BYTES,
        f"{field}.values",
        "must hold one digest per started stride of token_count",
    )


def quiet_ns(register: lease_pb2.RegisterEngine) -> int | None:
    """Reads the time since the engine last vouched; None if never. Raises InvalidArgument."""
    if not register.HasField("quiet"):
        return None
    return span_ns(register.quiet, "register.quiet")


def hold_ns(register: lease_pb2.RegisterEngine) -> int:
    """Reads for how long earlier terms' readers may remain; 0 if there are none.

    Raises InvalidArgument.
    """
    span = span_ns(register.hold, "register.hold")
    _check(span <= HOLD_MAX_NS, "register.hold", "must not exceed the longest that is ever allowed")
    return span


def withdrawn(
    heartbeat: lease_pb2.Heartbeat, count_max: int
) -> list[tuple[LeaseId, ReleaseReason]]:
    """Reads the leases that a heartbeat gives up. Raises InvalidArgument."""
    field = "heartbeat.withdrawn"
    _check(len(heartbeat.withdrawn) <= count_max, field, f"must be at most {count_max}")
    leases = []
    for index, each in enumerate(heartbeat.withdrawn):
        _check(
            int(each.reason) in _WITHDRAW_REASONS,
            f"{field}[{index}].reason",
            "must be PRESSURE, EXPIRED or SUPERSEDED",
        )
        named = lease_id(each.lease_id, f"{field}[{index}].lease_id")
        leases.append((named, ReleaseReason(each.reason)))
    return leases


def memory(heartbeat: lease_pb2.Heartbeat) -> KvMemory | None:
    """Reads the engine's KV memory, None if it told none."""
    if not heartbeat.HasField("memory"):
        return None
    told = heartbeat.memory
    return KvMemory(told.total_blocks, told.free_blocks, told.retained_blocks)


def freed(message: lease_pb2.RetentionFreed) -> tuple[LeaseId, ReleaseReason]:
    """Reads a retention that its engine freed by itself. Raises InvalidArgument."""
    _check(int(message.reason) in _FREED_REASONS, "freed.reason", "must be CONSUMED or EXPIRED")
    return lease_id(message.lease_id, "freed.lease_id"), ReleaseReason(message.reason)


# ---- what readers, routers and operators ask -------------------------------------------------


def read_outcome(request: lease_pb2.EndReadRequest) -> ReadOutcome:
    """Reads how a read ended. Raises InvalidArgument."""
    _check(
        int(request.outcome) in list(ReadOutcome), "outcome", "must be set to an outcome of the API"
    )
    span_ns(request.read_time, "read_time")
    return ReadOutcome(request.outcome)


def reader_engine_id(request: lease_pb2.BeginReadRequest) -> str:
    """Reads who asks; may be empty. Raises InvalidArgument."""
    _check_text(request.reader_engine_id, "reader_engine_id", 0, _ENGINE_ID_BYTES_MAX)
    return request.reader_engine_id


def turns_delta(request: lease_pb2.TouchConversationRequest) -> int:
    """Reads the change to the turns in flight. Raises InvalidArgument."""
    delta = request.turns_in_flight_delta
    most = TURNS_IN_FLIGHT_MAX  # more than one: a router may report several turns at once
    _check(-most <= delta <= most, "turns_in_flight_delta", f"must be -{most} to {most}")
    return delta


def absence_ns(request: lease_pb2.KeepConversationAliveRequest) -> int | None:
    """Reads how long the client is away, None if it did not say. Raises InvalidArgument."""
    if not request.HasField("absence"):
        return None
    span = span_ns(request.absence, "absence")
    _check(span > 0, "absence", "must be above 0; EndConversation ends a conversation at once")
    return span


def resolve_wait_ns(request: lease_pb2.ResolveConversationRequest) -> int:
    """Reads how long an answer may wait for a grant. Raises InvalidArgument."""
    return min(span_ns(request.wait, "wait"), RESOLVE_WAIT_MAX_NS)


def drained_engine_id(request: lease_pb2.DrainEngineRequest) -> str:
    """Reads which engine is meant. Raises InvalidArgument."""
    _check_text(request.engine_id, "engine_id", 1, _ENGINE_ID_BYTES_MAX)
    return request.engine_id


def page(
    request: lease_pb2.ListLeasesRequest,
) -> tuple[str, ConversationKey | None, int, str]:
    """Reads (engine id, conversation, page size, page token). Raises InvalidArgument."""
    _check_text(request.engine_id, "engine_id", 0, _ENGINE_ID_BYTES_MAX)
    key = None
    if request.HasField("conversation"):
        key = conversation_key(request.conversation, "conversation")
    page_size = _page_size(request.page_size)
    if request.page_token:
        lease_id(request.page_token, "page_token")
    return request.engine_id, key, page_size, request.page_token


def _page_size(asked: int) -> int:
    _check(asked <= PAGE_SIZE_MAX, "page_size", f"must be 1 to {PAGE_SIZE_MAX}, or 0")
    return asked or _PAGE_SIZE_DEFAULT


def wanted(request: lease_pb2.ListConversationsRequest) -> tuple[Wanted, int]:
    """Reads which conversations to list, and how many at most. Raises InvalidArgument."""
    _check_text(request.tenant, "tenant", 0, _KEY_PART_BYTES_MAX)
    _check_text(request.model, "model", 0, _KEY_PART_BYTES_MAX)
    _check_text(request.engine_id, "engine_id", 0, _ENGINE_ID_BYTES_MAX)
    _check_text(request.conversation_id, "conversation_id", 0, _KEY_PART_BYTES_MAX)
    which = Wanted(
        tenant=request.tenant,
        model=request.model,
        engine_id=request.engine_id,
        retained_only=request.retained_only,
        conversation_id=request.conversation_id,
    )
    return which, _page_size(request.page_size)


# ---- what routers send -----------------------------------------------------------------------


def hello(request: lease_pb2.RouterSessionRequest) -> list[Beginning]:
    """Reads the first message's turns in flight. Raises InvalidArgument.

    Turns that are malformed are left out: they were refused when they began.
    """
    _check(request.HasField("hello"), "hello", "must be set in the first message")
    _check_shown(request.hello.router_id, "hello.router_id", 1, _ROUTER_ID_BYTES_MAX)
    _check_shown(request.hello.version, "hello.version", 0, _NAME_BYTES_MAX)
    turns = []
    for message in request.hello.turns_in_flight:
        with contextlib.suppress(InvalidArgument):
            turns.append(beginning(message))
    return turns


def beginning(message: lease_pb2.BeginTurn) -> Beginning:
    """Reads a turn that begins. Raises InvalidArgument."""
    key = conversation_key(message.conversation, "begin_turns.conversation")
    points = list(message.points)
    if len(points) > POINTS_MAX or not set(map(len, points)) <= _DIGEST_LENGTHS:
        problem = f"must be at most {POINTS_MAX} of {DIGEST_BYTES} bytes"
        raise InvalidArgument("begin_turns.points", problem)
    wait_ns = span_ns(message.wait, "begin_turns.wait") if message.HasField("wait") else 0
    span, parent = _traced(message.trace) if message.HasField("trace") else (b"", b"")
    return Beginning(
        message.turn_id,
        key,
        message.recognise,
        points,
        min(wait_ns, RESOLVE_WAIT_MAX_NS),
        message.reuse,
        message.turn,
        span,
        parent,
    )


def _traced(trace: lease_pb2.TurnTrace) -> tuple[bytes, bytes]:
    """Reads what names a turn's span, and the one to go on under; both empty if malformed."""
    trace_id = trace.trace_id
    names = trace_id + trace.span_id, trace_id + trace.parent_span_id
    well_formed = len(trace_id) == TRACE_ID_BYTES and set(map(len, names)) == {SPAN_NAME_BYTES}
    return names if well_formed else (b"", b"")


def turn_report(report: common_pb2.TurnReport, number: int) -> bytes:
    """Reads how a turn was served, serialized; empty if it is longer than any that is true.

    The conversation's id is left out, it is kept once, and so is the age, which we tell; `number`,
    if known, is put in.
    """
    if report.ByteSize() > _REPORT_BYTES_MAX:
        return b""
    report.ClearField("conversation_id")
    report.ClearField("age")
    if number:
        report.turn = number
    return report.SerializeToString()


# ---- answers ---------------------------------------------------------------------------------


def _reason(reason: ReleaseReason) -> common_pb2.ReleaseReason:
    return cast("common_pb2.ReleaseReason", int(reason))


def _verdict(verdict: Verdict) -> common_pb2.Verdict:
    return cast("common_pb2.Verdict", int(verdict))


def engine_message(
    send: SendToEngine, term: int, config: LessorConfig
) -> lease_pb2.EngineSessionResponse:
    """Writes a message on an engine's session."""
    response = lease_pb2.EngineSessionResponse(
        term=term, sequence=send.sequence, session_number=send.session.number
    )
    match send.message:
        case Registered():
            response.registered.session_ttl.CopyFrom(duration(config.session_ttl_ns))
            response.registered.longest_read.CopyFrom(duration(config.longest_read_ns))
            response.registered.heartbeat_interval.CopyFrom(duration(config.heartbeat_ns))
        case HeartbeatAck(reading=reading, outlooks=outlooks):
            response.heartbeat_ack.SetInParent()
            response.heartbeat_ack.reading.extend(str(named) for named in reading)
            for named, outlook in outlooks:
                response.heartbeat_ack.outlooks.add(
                    lease_id=str(named), outlook=cast("lease_pb2.Outlook", int(outlook))
                )
        case Release(lease_id=named, reason=reason):
            response.release.lease_id = str(named)
            response.release.reason = _reason(reason)
        case GrantRefused(lease_id=named, reason=text):
            response.grant_refused.lease_id = str(named)
            response.grant_refused.reason = text
    return response


def resolution(resolved: Resolution, longest_read_ns: int) -> lease_pb2.ResolveConversationResponse:
    """Writes who holds a conversation."""
    return lease_pb2.ResolveConversationResponse(
        lease_id="" if resolved.lease_id is None else str(resolved.lease_id),
        verdict=_verdict(resolved.verdict),
        engine_id=resolved.engine_id,
        http_address=resolved.http_address,
        token_count=resolved.token_count,
        longest_read=duration(longest_read_ns),
    )


def write_begun(response: lease_pb2.RouterSessionResponse, begun: Begun) -> None:
    """Adds the answer to a turn that began."""
    resolved = begun.resolution
    if begun.refused:
        response.turns.add(turn_id=begun.turn_id, refused=begun.refused)
    elif resolved is None:
        response.turns.add(
            turn_id=begun.turn_id,
            conversation_id=begun.conversation_id,
            turn=begun.number,
            verdict=common_pb2.VERDICT_TURNED_OFF,
            previous=_turn_trace(begun.previous),
        )
    else:
        response.turns.add(
            turn_id=begun.turn_id,
            conversation_id=begun.conversation_id,
            turn=begun.number,
            lease_id="" if resolved.lease_id is None else str(resolved.lease_id),
            verdict=_verdict(resolved.verdict),
            engine_id=resolved.engine_id,
            http_address=resolved.http_address,
            token_count=resolved.token_count,
            prompt_tokens=resolved.prompt_tokens,
            extends=begun.extends,
            previous=_turn_trace(begun.previous),
        )


def _turn_trace(span: bytes) -> lease_pb2.TurnTrace | None:
    if not span:
        return None
    return lease_pb2.TurnTrace(trace_id=span[:TRACE_ID_BYTES], span_id=span[TRACE_ID_BYTES:])


def write_retained(response: lease_pb2.RouterSessionResponse, retained: Retained) -> None:
    """Adds what is retained of a turn."""
    response.retained.add(
        turn_id=retained.turn_id,
        token_count=retained.retention.token_count,
        prompt_tokens=retained.retention.prompt_tokens,
        local_cached_tokens=retained.retention.local_cached_tokens,
    )


def turns(
    reports: Sequence[tuple[ConversationKey, KeptReport]], held: Sequence[LeaseView], now_ns: int
) -> lease_pb2.ListTurnsResponse:
    """Writes reports that turn_report() read, and the leases that are left of them."""
    response = lease_pb2.ListTurnsResponse(leases=map(lease, held))
    for key, kept in reports:
        _write_report(response.turns.add(), key, kept, now_ns)
    return response


def _write_report(
    report: common_pb2.TurnReport, key: ConversationKey, kept: KeptReport, now_ns: int
) -> None:
    report.ParseFromString(kept.report)
    report.conversation_id = key.conversation_id
    report.age.CopyFrom(duration(max(0, now_ns - kept.came_ns)))


def write_conversation(
    response: lease_pb2.ListConversationsResponse,
    view: ConversationView,
    newest: KeptReport | None,
    now_ns: int,
) -> None:
    """Adds a conversation as an operator sees it, with its latest report."""
    message = response.conversations.add(
        turns=view.turns,
        turns_in_flight=view.turns_in_flight,
        engine_id=view.engine_id,
        token_count=view.token_count,
        block_count=view.block_count,
        lease_count=view.lease_count,
    )
    message.key.tenant, message.key.model, message.key.conversation_id = view.key
    if view.quiet_ns is not None:
        message.quiet_for.CopyFrom(duration(view.quiet_ns))
    if view.idle_in_ns is not None:
        message.idle_in.CopyFrom(duration(view.idle_in_ns))
    if newest is not None:
        _write_report(message.latest_turn, view.key, newest, now_ns)


def read_answer(
    answer: ReadAnswer, request: lease_pb2.BeginReadRequest, longest_read_ns: int
) -> lease_pb2.BeginReadResponse:
    """Writes the answer to the one question that hands out blocks."""
    if answer.verdict:
        return lease_pb2.BeginReadResponse(granted=False, verdict=_verdict(answer.verdict))
    response = lease_pb2.BeginReadResponse(granted=True, longest_read=duration(longest_read_ns))
    response.retention.ParseFromString(answer.payload)
    response.retention.lease_id = request.lease_id
    response.retention.conversation.CopyFrom(request.conversation)
    response.nixl.ParseFromString(answer.nixl)
    return response


def lease(view: LeaseView) -> lease_pb2.Lease:
    """Writes a lease as an operator sees it."""
    message = lease_pb2.Lease(
        lease_id=str(view.lease_id),
        conversation=common_pb2.ConversationKey(**view.conversation._asdict()),
        engine_id=view.engine_id,
        state=cast("lease_pb2.Lease.State", int(view.state)),
        release_reason=_reason(view.end_reason),
        token_count=view.token_count,
        block_count=view.block_count,
        age=duration(view.age_ns),
    )
    if view.idle_in_ns is not None:
        message.idle_in.CopyFrom(duration(view.idle_in_ns))
    if view.reading_for_ns is not None:
        message.reading_for.CopyFrom(duration(view.reading_for_ns))
    return message


def engine(view: EngineView) -> lease_pb2.Engine:
    """Writes a live engine."""
    message = lease_pb2.Engine(
        session_number=view.session_number,
        lease_count=view.lease_count,
        last_heartbeat_age=duration(view.heartbeat_age_ns),
        draining=view.draining,
        expired_session_count=view.expired_count,
    )
    if view.expiry_age_ns is not None:
        message.last_expiry_age.CopyFrom(duration(view.expiry_age_ns))
    message.description.ParseFromString(view.description)
    if view.memory is not None:
        message.memory.total_blocks = view.memory.total_blocks
        message.memory.free_blocks = view.memory.free_blocks
        message.memory.retained_blocks = view.memory.retained_blocks
    return message


def service(
    config: LeaseConfig,
    version: str,
    refusal: LeaseServiceError | None,
    routers: Iterable[lease_pb2.Router],
) -> lease_pb2.DescribeServiceResponse:
    """Writes what a lease service says of itself; `refusal` is None if it leads."""
    response = lease_pb2.DescribeServiceResponse(
        version=version,
        leads=refusal is None,
        times=_times(config),
        policy=config.lessor.policy,
        etcd_endpoints=() if config.etcd is None else config.etcd.endpoints,
        guarded=not config.trusts_all,
        routers=routers,
    )
    if refusal is not None:
        response.refusal = refusal.reason
        response.leader = refusal.metadata.get("leader", "")
    response.wall_time.GetCurrentTime()
    return response


def _times(config: LeaseConfig) -> lease_pb2.LeaseTimes:
    core = config.lessor
    times = lease_pb2.LeaseTimes(
        session_ttl=duration(core.session_ttl_ns),
        heartbeat_interval=duration(core.heartbeat_ns),
        longest_read=duration(core.longest_read_ns),
        question_deadline=duration(core.question_deadline_ns),
        idle=duration(core.idle_ns),
        max_hold=duration(core.max_hold_ns),
    )
    if core.policy == Policy.FIXED_TTL:
        times.fixed_ttl.CopyFrom(duration(core.fixed_ttl_ns))
    if config.etcd is not None:
        times.leadership.CopyFrom(duration(config.leadership_ns))
    return times
