from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_REUSED: _ClassVar[Verdict]
    VERDICT_PARTIAL_PREFIX: _ClassVar[Verdict]
    VERDICT_LOCAL: _ClassVar[Verdict]
    VERDICT_FIRST_TURN: _ClassVar[Verdict]
    VERDICT_NO_LEASE: _ClassVar[Verdict]
    VERDICT_ENDED: _ClassVar[Verdict]
    VERDICT_RELEASED: _ClassVar[Verdict]
    VERDICT_EXPIRED: _ClassVar[Verdict]
    VERDICT_CONSUMED: _ClassVar[Verdict]
    VERDICT_READ_IN_PROGRESS: _ClassVar[Verdict]
    VERDICT_READ_FAILED: _ClassVar[Verdict]
    VERDICT_READ_TOO_LONG: _ClassVar[Verdict]
    VERDICT_PREFIX_MISMATCH: _ClassVar[Verdict]
    VERDICT_BELOW_THRESHOLD: _ClassVar[Verdict]
    VERDICT_CHEAPER_TO_COMPUTE: _ClassVar[Verdict]
    VERDICT_UNSUPPORTED_MODEL: _ClassVar[Verdict]
    VERDICT_ENGINE_LOST: _ClassVar[Verdict]
    VERDICT_LEASE_SERVICE_UNREACHABLE: _ClassVar[Verdict]
    VERDICT_STORE_UNAVAILABLE: _ClassVar[Verdict]
    VERDICT_TURNED_OFF: _ClassVar[Verdict]
    VERDICT_NOT_OFFERED: _ClassVar[Verdict]

class PlanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_KIND_UNSPECIFIED: _ClassVar[PlanKind]
    PLAN_KIND_PULL: _ClassVar[PlanKind]
    PLAN_KIND_LOCAL: _ClassVar[PlanKind]
    PLAN_KIND_RECOMPUTE: _ClassVar[PlanKind]
    PLAN_KIND_ALONE: _ClassVar[PlanKind]

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_REASON_UNSPECIFIED: _ClassVar[ReleaseReason]
    RELEASE_REASON_CONSUMED: _ClassVar[ReleaseReason]
    RELEASE_REASON_SUPERSEDED: _ClassVar[ReleaseReason]
    RELEASE_REASON_ENDED: _ClassVar[ReleaseReason]
    RELEASE_REASON_IDLE: _ClassVar[ReleaseReason]
    RELEASE_REASON_PRESSURE: _ClassVar[ReleaseReason]
    RELEASE_REASON_ENGINE_LOST: _ClassVar[ReleaseReason]
    RELEASE_REASON_REVOKED: _ClassVar[ReleaseReason]
    RELEASE_REASON_EXPIRED: _ClassVar[ReleaseReason]
    RELEASE_REASON_READ_FAILED: _ClassVar[ReleaseReason]

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]
    ENGINE_ROLE_BOTH: _ClassVar[EngineRole]
VERDICT_UNSPECIFIED: Verdict
VERDICT_REUSED: Verdict
VERDICT_PARTIAL_PREFIX: Verdict
VERDICT_LOCAL: Verdict
VERDICT_FIRST_TURN: Verdict
VERDICT_NO_LEASE: Verdict
VERDICT_ENDED: Verdict
VERDICT_RELEASED: Verdict
VERDICT_EXPIRED: Verdict
VERDICT_CONSUMED: Verdict
VERDICT_READ_IN_PROGRESS: Verdict
VERDICT_READ_FAILED: Verdict
VERDICT_READ_TOO_LONG: Verdict
VERDICT_PREFIX_MISMATCH: Verdict
VERDICT_BELOW_THRESHOLD: Verdict
VERDICT_CHEAPER_TO_COMPUTE: Verdict
VERDICT_UNSUPPORTED_MODEL: Verdict
VERDICT_ENGINE_LOST: Verdict
VERDICT_LEASE_SERVICE_UNREACHABLE: Verdict
VERDICT_STORE_UNAVAILABLE: Verdict
VERDICT_TURNED_OFF: Verdict
VERDICT_NOT_OFFERED: Verdict
PLAN_KIND_UNSPECIFIED: PlanKind
PLAN_KIND_PULL: PlanKind
PLAN_KIND_LOCAL: PlanKind
PLAN_KIND_RECOMPUTE: PlanKind
PLAN_KIND_ALONE: PlanKind
RELEASE_REASON_UNSPECIFIED: ReleaseReason
RELEASE_REASON_CONSUMED: ReleaseReason
RELEASE_REASON_SUPERSEDED: ReleaseReason
RELEASE_REASON_ENDED: ReleaseReason
RELEASE_REASON_IDLE: ReleaseReason
RELEASE_REASON_PRESSURE: ReleaseReason
RELEASE_REASON_ENGINE_LOST: ReleaseReason
RELEASE_REASON_REVOKED: ReleaseReason
RELEASE_REASON_EXPIRED: ReleaseReason
RELEASE_REASON_READ_FAILED: ReleaseReason
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
ENGINE_ROLE_BOTH: EngineRole

class ConversationKey(_message.Message):
    __slots__ = ("tenant", "model", "conversation_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    conversation_id: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class TurnReport(_message.Message):
    __slots__ = ("conversation_id", "turn", "verdict", "prompt_tokens", "reused_tokens", "local_tokens", "prefill_time", "read_time", "read_bytes", "plan", "first_byte_time", "output_tokens", "prefill_engine", "decode_engine", "plan_reason", "saved_time", "trace_id", "total_time", "age")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    READ_TIME_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    PLAN_REASON_FIELD_NUMBER: _ClassVar[int]
    SAVED_TIME_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    turn: int
    verdict: Verdict
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    prefill_time: _duration_pb2.Duration
    read_time: _duration_pb2.Duration
    read_bytes: int
    plan: PlanKind
    first_byte_time: _duration_pb2.Duration
    output_tokens: int
    prefill_engine: str
    decode_engine: str
    plan_reason: str
    saved_time: _duration_pb2.Duration
    trace_id: str
    total_time: _duration_pb2.Duration
    age: _duration_pb2.Duration
    def __init__(self, conversation_id: _Optional[str] = ..., turn: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., prompt_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., prefill_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., read_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., read_bytes: _Optional[int] = ..., plan: _Optional[_Union[PlanKind, str]] = ..., first_byte_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., output_tokens: _Optional[int] = ..., prefill_engine: _Optional[str] = ..., decode_engine: _Optional[str] = ..., plan_reason: _Optional[str] = ..., saved_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., trace_id: _Optional[str] = ..., total_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BlockGroup(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenDigests(_message.Message):
    __slots__ = ("stride_tokens", "digest_bytes", "values")
    STRIDE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    stride_tokens: int
    digest_bytes: int
    values: bytes
    def __init__(self, stride_tokens: _Optional[int] = ..., digest_bytes: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("lease_id", "conversation", "token_count", "block_size", "groups", "digests", "whole_only", "prompt_tokens", "local_cached_tokens", "turn", "history")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ONLY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    conversation: ConversationKey
    token_count: int
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[BlockGroup]
    digests: TokenDigests
    whole_only: bool
    prompt_tokens: int
    local_cached_tokens: int
    turn: int
    history: bytes
    def __init__(self, lease_id: _Optional[str] = ..., conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., token_count: _Optional[int] = ..., block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BlockGroup, _Mapping]]] = ..., digests: _Optional[_Union[TokenDigests, _Mapping]] = ..., whole_only: bool = ..., prompt_tokens: _Optional[int] = ..., local_cached_tokens: _Optional[int] = ..., turn: _Optional[int] = ..., history: _Optional[bytes] = ...) -> None: ...

class NixlAddress(_message.Message):
    __slots__ = ("nixl_engine_id", "host", "port", "tp_size", "dcp_size", "pp_size")
    NIXL_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    nixl_engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    def __init__(self, nixl_engine_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., tp_size: _Optional[int] = ..., dcp_size: _Optional[int] = ..., pp_size: _Optional[int] = ...) -> None: ...
