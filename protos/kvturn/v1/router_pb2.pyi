from google.protobuf import duration_pb2 as _duration_pb2
from kvturn.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Api(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    API_UNSPECIFIED: _ClassVar[Api]
    API_CHAT_COMPLETIONS: _ClassVar[Api]
    API_COMPLETIONS: _ClassVar[Api]
API_UNSPECIFIED: Api
API_CHAT_COMPLETIONS: Api
API_COMPLETIONS: Api

class ChatRequest(_message.Message):
    __slots__ = ("conversation_id", "body_json", "reuse", "scope", "api")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    body_json: str
    reuse: str
    scope: str
    api: Api
    def __init__(self, conversation_id: _Optional[str] = ..., body_json: _Optional[str] = ..., reuse: _Optional[str] = ..., scope: _Optional[str] = ..., api: _Optional[_Union[Api, str]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("report", "chunk_json")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_JSON_FIELD_NUMBER: _ClassVar[int]
    report: _common_pb2.TurnReport
    chunk_json: str
    def __init__(self, report: _Optional[_Union[_common_pb2.TurnReport, _Mapping]] = ..., chunk_json: _Optional[str] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("conversation_id", "body_json", "reuse", "scope", "api")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    body_json: str
    reuse: str
    scope: str
    api: Api
    def __init__(self, conversation_id: _Optional[str] = ..., body_json: _Optional[str] = ..., reuse: _Optional[str] = ..., scope: _Optional[str] = ..., api: _Optional[_Union[Api, str]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("report", "body_json")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    report: _common_pb2.TurnReport
    body_json: str
    def __init__(self, report: _Optional[_Union[_common_pb2.TurnReport, _Mapping]] = ..., body_json: _Optional[str] = ...) -> None: ...

class GetConversationRequest(_message.Message):
    __slots__ = ("conversation_id", "model")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    model: str
    def __init__(self, conversation_id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class GetConversationResponse(_message.Message):
    __slots__ = ("turns", "held")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[_common_pb2.TurnReport]
    held: _containers.RepeatedCompositeFieldContainer[HeldRetention]
    def __init__(self, turns: _Optional[_Iterable[_Union[_common_pb2.TurnReport, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[HeldRetention, _Mapping]]] = ...) -> None: ...

class HeldRetention(_message.Message):
    __slots__ = ("conversation_id", "engine_id", "token_count", "being_read", "kept")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BEING_READ_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    engine_id: str
    token_count: int
    being_read: bool
    kept: _duration_pb2.Duration
    def __init__(self, conversation_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., token_count: _Optional[int] = ..., being_read: bool = ..., kept: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

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
