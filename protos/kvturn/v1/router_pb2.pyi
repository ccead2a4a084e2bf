from google.protobuf import duration_pb2 as _duration_pb2
from kvturn.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatRequest(_message.Message):
    __slots__ = ("conversation_id", "body_json", "reuse")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    body_json: str
    reuse: str
    def __init__(self, conversation_id: _Optional[str] = ..., body_json: _Optional[str] = ..., reuse: _Optional[str] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("report", "chunk_json")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_JSON_FIELD_NUMBER: _ClassVar[int]
    report: TurnReport
    chunk_json: str
    def __init__(self, report: _Optional[_Union[TurnReport, _Mapping]] = ..., chunk_json: _Optional[str] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("conversation_id", "body_json", "reuse")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    body_json: str
    reuse: str
    def __init__(self, conversation_id: _Optional[str] = ..., body_json: _Optional[str] = ..., reuse: _Optional[str] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("report", "body_json")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    report: TurnReport
    body_json: str
    def __init__(self, report: _Optional[_Union[TurnReport, _Mapping]] = ..., body_json: _Optional[str] = ...) -> None: ...

class TurnReport(_message.Message):
    __slots__ = ("conversation_id", "turn", "verdict", "prompt_tokens", "reused_tokens", "local_tokens", "prefill_time", "read_time", "read_bytes")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    READ_TIME_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    turn: int
    verdict: _common_pb2.Verdict
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    prefill_time: _duration_pb2.Duration
    read_time: _duration_pb2.Duration
    read_bytes: int
    def __init__(self, conversation_id: _Optional[str] = ..., turn: _Optional[int] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, str]] = ..., prompt_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., prefill_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., read_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., read_bytes: _Optional[int] = ...) -> None: ...

class GetConversationRequest(_message.Message):
    __slots__ = ("conversation_id", "model")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    model: str
    def __init__(self, conversation_id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class GetConversationResponse(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[TurnReport]
    def __init__(self, turns: _Optional[_Iterable[_Union[TurnReport, _Mapping]]] = ...) -> None: ...

class RouterServiceEndConversationRequest(_message.Message):
    __slots__ = ("conversation_id", "model")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    model: str
    def __init__(self, conversation_id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RouterServiceEndConversationResponse(_message.Message):
    __slots__ = ("leases_ended",)
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    leases_ended: int
    def __init__(self, leases_ended: _Optional[int] = ...) -> None: ...

class RouterServiceKeepConversationAliveRequest(_message.Message):
    __slots__ = ("conversation_id", "model", "absence")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ABSENCE_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    model: str
    absence: _duration_pb2.Duration
    def __init__(self, conversation_id: _Optional[str] = ..., model: _Optional[str] = ..., absence: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RouterServiceKeepConversationAliveResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: _duration_pb2.Duration
    def __init__(self, kept: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
