from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvturn.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outlook(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTLOOK_UNSPECIFIED: _ClassVar[Outlook]
    OUTLOOK_NORMAL: _ClassVar[Outlook]
    OUTLOOK_EXPECTED: _ClassVar[Outlook]
    OUTLOOK_IDLE: _ClassVar[Outlook]

class ReadOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_OUTCOME_UNSPECIFIED: _ClassVar[ReadOutcome]
    READ_OUTCOME_COMPLETED: _ClassVar[ReadOutcome]
    READ_OUTCOME_NOT_READ: _ClassVar[ReadOutcome]
    READ_OUTCOME_FAILED: _ClassVar[ReadOutcome]
    READ_OUTCOME_TOO_LONG: _ClassVar[ReadOutcome]
OUTLOOK_UNSPECIFIED: Outlook
OUTLOOK_NORMAL: Outlook
OUTLOOK_EXPECTED: Outlook
OUTLOOK_IDLE: Outlook
READ_OUTCOME_UNSPECIFIED: ReadOutcome
READ_OUTCOME_COMPLETED: ReadOutcome
READ_OUTCOME_NOT_READ: ReadOutcome
READ_OUTCOME_FAILED: ReadOutcome
READ_OUTCOME_TOO_LONG: ReadOutcome

class EngineDescription(_message.Message):
    __slots__ = ("engine_id", "incarnation", "role", "http_address", "nixl", "model", "vllm_version", "connector_version", "kv_blocks", "block_size", "settings")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    role: _common_pb2.EngineRole
    http_address: str
    nixl: _common_pb2.NixlAddress
    model: str
    vllm_version: str
    connector_version: str
    kv_blocks: int
    block_size: int
    settings: EngineSettings
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.EngineRole, str]] = ..., http_address: _Optional[str] = ..., nixl: _Optional[_Union[_common_pb2.NixlAddress, _Mapping]] = ..., model: _Optional[str] = ..., vllm_version: _Optional[str] = ..., connector_version: _Optional[str] = ..., kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., settings: _Optional[_Union[EngineSettings, _Mapping]] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("dtype", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "prefix_caching", "bidirectional_kv_xfer", "kv_load_failure_policy", "decoder_kv_blocks_ttl", "kv_recompute_threshold", "kv_buffer_device", "nixl_backends", "nixl_version", "traced", "machine", "network", "rdma_devices", "plain_attention", "secret_check", "question_deadline")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    BIDIRECTIONAL_KV_XFER_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    DECODER_KV_BLOCKS_TTL_FIELD_NUMBER: _ClassVar[int]
    KV_RECOMPUTE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    KV_BUFFER_DEVICE_FIELD_NUMBER: _ClassVar[int]
    NIXL_BACKENDS_FIELD_NUMBER: _ClassVar[int]
    NIXL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SECRET_CHECK_FIELD_NUMBER: _ClassVar[int]
    QUESTION_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_model_len: int
    prefix_caching: bool
    bidirectional_kv_xfer: bool
    kv_load_failure_policy: str
    decoder_kv_blocks_ttl: _duration_pb2.Duration
    kv_recompute_threshold: int
    kv_buffer_device: str
    nixl_backends: _containers.RepeatedScalarFieldContainer[str]
    nixl_version: str
    traced: bool
    machine: str
    network: str
    rdma_devices: _containers.RepeatedScalarFieldContainer[str]
    plain_attention: bool
    secret_check: int
    question_deadline: _duration_pb2.Duration
    def __init__(self, dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., prefix_caching: bool = ..., bidirectional_kv_xfer: bool = ..., kv_load_failure_policy: _Optional[str] = ..., decoder_kv_blocks_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., kv_recompute_threshold: _Optional[int] = ..., kv_buffer_device: _Optional[str] = ..., nixl_backends: _Optional[_Iterable[str]] = ..., nixl_version: _Optional[str] = ..., traced: bool = ..., machine: _Optional[str] = ..., network: _Optional[str] = ..., rdma_devices: _Optional[_Iterable[str]] = ..., plain_attention: bool = ..., secret_check: _Optional[int] = ..., question_deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EngineSessionRequest(_message.Message):
    __slots__ = ("session_number", "sequence", "register", "heartbeat", "grant", "freed")
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    session_number: int
    sequence: int
    register: RegisterEngine
    heartbeat: Heartbeat
    grant: Grant
    freed: RetentionFreed
    def __init__(self, session_number: _Optional[int] = ..., sequence: _Optional[int] = ..., register: _Optional[_Union[RegisterEngine, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., freed: _Optional[_Union[RetentionFreed, _Mapping]] = ...) -> None: ...

class RegisterEngine(_message.Message):
    __slots__ = ("engine", "inventory", "quiet", "previous_term", "hold")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_TERM_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    engine: EngineDescription
    inventory: _containers.RepeatedCompositeFieldContainer[_common_pb2.Retention]
    quiet: _duration_pb2.Duration
    previous_term: int
    hold: _duration_pb2.Duration
    def __init__(self, engine: _Optional[_Union[EngineDescription, _Mapping]] = ..., inventory: _Optional[_Iterable[_Union[_common_pb2.Retention, _Mapping]]] = ..., quiet: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., previous_term: _Optional[int] = ..., hold: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("echo_term", "echo_sequence", "withdrawn", "memory")
    ECHO_TERM_FIELD_NUMBER: _ClassVar[int]
    ECHO_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    echo_term: int
    echo_sequence: int
    withdrawn: _containers.RepeatedCompositeFieldContainer[WithdrawnLease]
    memory: KvMemory
    def __init__(self, echo_term: _Optional[int] = ..., echo_sequence: _Optional[int] = ..., withdrawn: _Optional[_Iterable[_Union[WithdrawnLease, _Mapping]]] = ..., memory: _Optional[_Union[KvMemory, _Mapping]] = ...) -> None: ...

class WithdrawnLease(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: _common_pb2.ReleaseReason
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.ReleaseReason, str]] = ...) -> None: ...

class KvMemory(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "retained_blocks")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    retained_blocks: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., retained_blocks: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("retention", "traceparent")
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    retention: _common_pb2.Retention
    traceparent: str
    def __init__(self, retention: _Optional[_Union[_common_pb2.Retention, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RetentionFreed(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: _common_pb2.ReleaseReason
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.ReleaseReason, str]] = ...) -> None: ...

class EngineSessionResponse(_message.Message):
    __slots__ = ("term", "sequence", "session_number", "registered", "heartbeat_ack", "release", "grant_refused")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    GRANT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    term: int
    sequence: int
    session_number: int
    registered: Registered
    heartbeat_ack: HeartbeatAck
    release: Release
    grant_refused: GrantRefused
    def __init__(self, term: _Optional[int] = ..., sequence: _Optional[int] = ..., session_number: _Optional[int] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., grant_refused: _Optional[_Union[GrantRefused, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("session_ttl", "longest_read", "heartbeat_interval")
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    LONGEST_READ_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    session_ttl: _duration_pb2.Duration
    longest_read: _duration_pb2.Duration
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, session_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., longest_read: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LeaseOutlook(_message.Message):
    __slots__ = ("lease_id", "outlook")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    outlook: Outlook
    def __init__(self, lease_id: _Optional[str] = ..., outlook: _Optional[_Union[Outlook, str]] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("reading", "outlooks")
    READING_FIELD_NUMBER: _ClassVar[int]
    OUTLOOKS_FIELD_NUMBER: _ClassVar[int]
    reading: _containers.RepeatedScalarFieldContainer[str]
    outlooks: _containers.RepeatedCompositeFieldContainer[LeaseOutlook]
    def __init__(self, reading: _Optional[_Iterable[str]] = ..., outlooks: _Optional[_Iterable[_Union[LeaseOutlook, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: _common_pb2.ReleaseReason
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.ReleaseReason, str]] = ...) -> None: ...

class GrantRefused(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RouterSessionRequest(_message.Message):
    __slots__ = ("hello", "begin_turns", "end_turns")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TURNS_FIELD_NUMBER: _ClassVar[int]
    END_TURNS_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    begin_turns: _containers.RepeatedCompositeFieldContainer[BeginTurn]
    end_turns: _containers.RepeatedCompositeFieldContainer[EndTurn]
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., begin_turns: _Optional[_Iterable[_Union[BeginTurn, _Mapping]]] = ..., end_turns: _Optional[_Iterable[_Union[EndTurn, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "turns_in_flight", "version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TURNS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    turns_in_flight: _containers.RepeatedCompositeFieldContainer[BeginTurn]
    version: str
    def __init__(self, router_id: _Optional[str] = ..., turns_in_flight: _Optional[_Iterable[_Union[BeginTurn, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class BeginTurn(_message.Message):
    __slots__ = ("turn_id", "conversation", "recognise", "points", "wait", "reuse", "turn", "trace")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    RECOGNISE_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    turn_id: int
    conversation: _common_pb2.ConversationKey
    recognise: bool
    points: _containers.RepeatedScalarFieldContainer[bytes]
    wait: _duration_pb2.Duration
    reuse: bool
    turn: int
    trace: TurnTrace
    def __init__(self, turn_id: _Optional[int] = ..., conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., recognise: bool = ..., points: _Optional[_Iterable[bytes]] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., reuse: bool = ..., turn: _Optional[int] = ..., trace: _Optional[_Union[TurnTrace, _Mapping]] = ...) -> None: ...

class TurnTrace(_message.Message):
    __slots__ = ("trace_id", "span_id", "parent_span_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    def __init__(self, trace_id: _Optional[bytes] = ..., span_id: _Optional[bytes] = ..., parent_span_id: _Optional[bytes] = ...) -> None: ...

class EndTurn(_message.Message):
    __slots__ = ("turn_id", "retains", "report")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    RETAINS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    turn_id: int
    retains: bool
    report: _common_pb2.TurnReport
    def __init__(self, turn_id: _Optional[int] = ..., retains: bool = ..., report: _Optional[_Union[_common_pb2.TurnReport, _Mapping]] = ...) -> None: ...

class RouterSessionResponse(_message.Message):
    __slots__ = ("turns", "engines", "engines_gone", "retained", "welcome")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_GONE_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[TurnBegun]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    engines_gone: _containers.RepeatedScalarFieldContainer[str]
    retained: _containers.RepeatedCompositeFieldContainer[TurnRetained]
    welcome: RouterWelcome
    def __init__(self, turns: _Optional[_Iterable[_Union[TurnBegun, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., engines_gone: _Optional[_Iterable[str]] = ..., retained: _Optional[_Iterable[_Union[TurnRetained, _Mapping]]] = ..., welcome: _Optional[_Union[RouterWelcome, _Mapping]] = ...) -> None: ...

class RouterWelcome(_message.Message):
    __slots__ = ("longest_read",)
    LONGEST_READ_FIELD_NUMBER: _ClassVar[int]
    longest_read: _duration_pb2.Duration
    def __init__(self, longest_read: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TurnBegun(_message.Message):
    __slots__ = ("turn_id", "conversation_id", "turn", "lease_id", "verdict", "engine_id", "http_address", "token_count", "prompt_tokens", "extends", "refused", "previous")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    turn_id: int
    conversation_id: str
    turn: int
    lease_id: str
    verdict: _common_pb2.Verdict
    engine_id: str
    http_address: str
    token_count: int
    prompt_tokens: int
    extends: bool
    refused: str
    previous: TurnTrace
    def __init__(self, turn_id: _Optional[int] = ..., conversation_id: _Optional[str] = ..., turn: _Optional[int] = ..., lease_id: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, str]] = ..., engine_id: _Optional[str] = ..., http_address: _Optional[str] = ..., token_count: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., extends: bool = ..., refused: _Optional[str] = ..., previous: _Optional[_Union[TurnTrace, _Mapping]] = ...) -> None: ...

class TurnRetained(_message.Message):
    __slots__ = ("turn_id", "token_count", "prompt_tokens", "local_cached_tokens")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    turn_id: int
    token_count: int
    prompt_tokens: int
    local_cached_tokens: int
    def __init__(self, turn_id: _Optional[int] = ..., token_count: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., local_cached_tokens: _Optional[int] = ...) -> None: ...

class ListTurnsRequest(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: _common_pb2.ConversationKey
    def __init__(self, conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ...) -> None: ...

class ListTurnsResponse(_message.Message):
    __slots__ = ("turns", "leases")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[_common_pb2.TurnReport]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, turns: _Optional[_Iterable[_Union[_common_pb2.TurnReport, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("key", "turns", "turns_in_flight", "quiet_for", "engine_id", "token_count", "block_count", "lease_count", "idle_in", "latest_turn")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TURNS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUIET_FOR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    IDLE_IN_FIELD_NUMBER: _ClassVar[int]
    LATEST_TURN_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    turns: int
    turns_in_flight: int
    quiet_for: _duration_pb2.Duration
    engine_id: str
    token_count: int
    block_count: int
    lease_count: int
    idle_in: _duration_pb2.Duration
    latest_turn: _common_pb2.TurnReport
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., turns: _Optional[int] = ..., turns_in_flight: _Optional[int] = ..., quiet_for: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., engine_id: _Optional[str] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., idle_in: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., latest_turn: _Optional[_Union[_common_pb2.TurnReport, _Mapping]] = ...) -> None: ...

class ListConversationsRequest(_message.Message):
    __slots__ = ("tenant", "model", "engine_id", "retained_only", "page_size", "conversation_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RETAINED_ONLY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    engine_id: str
    retained_only: bool
    page_size: int
    conversation_id: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., engine_id: _Optional[str] = ..., retained_only: bool = ..., page_size: _Optional[int] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class ListConversationsResponse(_message.Message):
    __slots__ = ("conversations", "total_size")
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[Conversation]
    total_size: int
    def __init__(self, conversations: _Optional[_Iterable[_Union[Conversation, _Mapping]]] = ..., total_size: _Optional[int] = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id", "draining")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    draining: bool
    def __init__(self, engine_id: _Optional[str] = ..., draining: bool = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResolveConversationRequest(_message.Message):
    __slots__ = ("conversation", "expected_turn", "wait")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TURN_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    conversation: _common_pb2.ConversationKey
    expected_turn: int
    wait: _duration_pb2.Duration
    def __init__(self, conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., expected_turn: _Optional[int] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResolveConversationResponse(_message.Message):
    __slots__ = ("lease_id", "verdict", "engine_id", "http_address", "token_count", "longest_read")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LONGEST_READ_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    verdict: _common_pb2.Verdict
    engine_id: str
    http_address: str
    token_count: int
    longest_read: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, str]] = ..., engine_id: _Optional[str] = ..., http_address: _Optional[str] = ..., token_count: _Optional[int] = ..., longest_read: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BeginReadRequest(_message.Message):
    __slots__ = ("lease_id", "conversation", "reader_engine_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    READER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    conversation: _common_pb2.ConversationKey
    reader_engine_id: str
    def __init__(self, lease_id: _Optional[str] = ..., conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., reader_engine_id: _Optional[str] = ...) -> None: ...

class BeginReadResponse(_message.Message):
    __slots__ = ("granted", "verdict", "retention", "nixl", "longest_read")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    LONGEST_READ_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    verdict: _common_pb2.Verdict
    retention: _common_pb2.Retention
    nixl: _common_pb2.NixlAddress
    longest_read: _duration_pb2.Duration
    def __init__(self, granted: bool = ..., verdict: _Optional[_Union[_common_pb2.Verdict, str]] = ..., retention: _Optional[_Union[_common_pb2.Retention, _Mapping]] = ..., nixl: _Optional[_Union[_common_pb2.NixlAddress, _Mapping]] = ..., longest_read: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EndReadRequest(_message.Message):
    __slots__ = ("lease_id", "outcome", "reused_tokens", "read_bytes", "read_time")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_TIME_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    outcome: ReadOutcome
    reused_tokens: int
    read_bytes: int
    read_time: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., outcome: _Optional[_Union[ReadOutcome, str]] = ..., reused_tokens: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EndReadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchConversationRequest(_message.Message):
    __slots__ = ("conversation", "turns_in_flight_delta")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TURNS_IN_FLIGHT_DELTA_FIELD_NUMBER: _ClassVar[int]
    conversation: _common_pb2.ConversationKey
    turns_in_flight_delta: int
    def __init__(self, conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., turns_in_flight_delta: _Optional[int] = ...) -> None: ...

class TouchConversationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepConversationAliveRequest(_message.Message):
    __slots__ = ("conversation", "absence")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ABSENCE_FIELD_NUMBER: _ClassVar[int]
    conversation: _common_pb2.ConversationKey
    absence: _duration_pb2.Duration
    def __init__(self, conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., absence: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class KeepConversationAliveResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: _duration_pb2.Duration
    def __init__(self, kept: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EndConversationRequest(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: _common_pb2.ConversationKey
    def __init__(self, conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ...) -> None: ...

class EndConversationResponse(_message.Message):
    __slots__ = ("leases_ended",)
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    leases_ended: int
    def __init__(self, leases_ended: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "conversation", "engine_id", "state", "release_reason", "token_count", "block_count", "age", "idle_in", "reading_for")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Lease.State]
        STATE_ACTIVE: _ClassVar[Lease.State]
        STATE_READING: _ClassVar[Lease.State]
        STATE_ENDING: _ClassVar[Lease.State]
    STATE_UNSPECIFIED: Lease.State
    STATE_ACTIVE: Lease.State
    STATE_READING: Lease.State
    STATE_ENDING: Lease.State
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    IDLE_IN_FIELD_NUMBER: _ClassVar[int]
    READING_FOR_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    conversation: _common_pb2.ConversationKey
    engine_id: str
    state: Lease.State
    release_reason: _common_pb2.ReleaseReason
    token_count: int
    block_count: int
    age: _duration_pb2.Duration
    idle_in: _duration_pb2.Duration
    reading_for: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., engine_id: _Optional[str] = ..., state: _Optional[_Union[Lease.State, str]] = ..., release_reason: _Optional[_Union[_common_pb2.ReleaseReason, str]] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., idle_in: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., reading_for: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class GetLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("engine_id", "conversation", "page_size", "page_token")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    conversation: _common_pb2.ConversationKey
    page_size: int
    page_token: str
    def __init__(self, engine_id: _Optional[str] = ..., conversation: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class RevokeLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Engine(_message.Message):
    __slots__ = ("description", "session_number", "lease_count", "memory", "last_heartbeat_age", "draining", "expired_session_count", "last_expiry_age")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_AGE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_EXPIRY_AGE_FIELD_NUMBER: _ClassVar[int]
    description: EngineDescription
    session_number: int
    lease_count: int
    memory: KvMemory
    last_heartbeat_age: _duration_pb2.Duration
    draining: bool
    expired_session_count: int
    last_expiry_age: _duration_pb2.Duration
    def __init__(self, description: _Optional[_Union[EngineDescription, _Mapping]] = ..., session_number: _Optional[int] = ..., lease_count: _Optional[int] = ..., memory: _Optional[_Union[KvMemory, _Mapping]] = ..., last_heartbeat_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., draining: bool = ..., expired_session_count: _Optional[int] = ..., last_expiry_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class DescribeServiceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeServiceResponse(_message.Message):
    __slots__ = ("version", "leads", "leader", "times", "policy", "etcd_endpoints", "guarded", "routers", "wall_time", "refusal")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ETCD_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    version: str
    leads: bool
    leader: str
    times: LeaseTimes
    policy: str
    etcd_endpoints: _containers.RepeatedScalarFieldContainer[str]
    guarded: bool
    routers: _containers.RepeatedCompositeFieldContainer[Router]
    wall_time: _timestamp_pb2.Timestamp
    refusal: str
    def __init__(self, version: _Optional[str] = ..., leads: bool = ..., leader: _Optional[str] = ..., times: _Optional[_Union[LeaseTimes, _Mapping]] = ..., policy: _Optional[str] = ..., etcd_endpoints: _Optional[_Iterable[str]] = ..., guarded: bool = ..., routers: _Optional[_Iterable[_Union[Router, _Mapping]]] = ..., wall_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class LeaseTimes(_message.Message):
    __slots__ = ("session_ttl", "heartbeat_interval", "longest_read", "question_deadline", "idle", "max_hold", "fixed_ttl", "leadership")
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    LONGEST_READ_FIELD_NUMBER: _ClassVar[int]
    QUESTION_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_FIELD_NUMBER: _ClassVar[int]
    FIXED_TTL_FIELD_NUMBER: _ClassVar[int]
    LEADERSHIP_FIELD_NUMBER: _ClassVar[int]
    session_ttl: _duration_pb2.Duration
    heartbeat_interval: _duration_pb2.Duration
    longest_read: _duration_pb2.Duration
    question_deadline: _duration_pb2.Duration
    idle: _duration_pb2.Duration
    max_hold: _duration_pb2.Duration
    fixed_ttl: _duration_pb2.Duration
    leadership: _duration_pb2.Duration
    def __init__(self, session_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., longest_read: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., question_deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., idle: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_hold: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., fixed_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., leadership: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Router(_message.Message):
    __slots__ = ("router_id", "version", "turns_in_flight")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TURNS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    version: str
    turns_in_flight: int
    def __init__(self, router_id: _Optional[str] = ..., version: _Optional[str] = ..., turns_in_flight: _Optional[int] = ...) -> None: ...
