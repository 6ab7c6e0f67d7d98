from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Awaits(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AWAITS_UNKNOWN: _ClassVar[Awaits]
    AWAITS_TOOL: _ClassVar[Awaits]
    AWAITS_USER: _ClassVar[Awaits]
    AWAITS_NOTHING: _ClassVar[Awaits]

class HintStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_STATUS_UNSPECIFIED: _ClassVar[HintStatus]
    HINT_ACCEPTED: _ClassVar[HintStatus]
    HINT_CLIPPED: _ClassVar[HintStatus]
    HINT_REFUSED: _ClassVar[HintStatus]
AWAITS_UNKNOWN: Awaits
AWAITS_TOOL: Awaits
AWAITS_USER: Awaits
AWAITS_NOTHING: Awaits
HINT_STATUS_UNSPECIFIED: HintStatus
HINT_ACCEPTED: HintStatus
HINT_CLIPPED: HintStatus
HINT_REFUSED: HintStatus

class KvHintsEnvelope(_message.Message):
    __slots__ = ("protocol_version", "message_id", "actions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    message_id: str
    actions: _containers.RepeatedCompositeFieldContainer[KvHintAction]
    def __init__(self, protocol_version: _Optional[str] = ..., message_id: _Optional[str] = ..., actions: _Optional[_Iterable[_Union[KvHintAction, _Mapping]]] = ...) -> None: ...

class KvHintAction(_message.Message):
    __slots__ = ("action_id", "action_type", "action_version", "payload")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    ACTION_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    action_type: str
    action_version: str
    payload: _struct_pb2.Struct
    def __init__(self, action_id: _Optional[str] = ..., action_type: _Optional[str] = ..., action_version: _Optional[str] = ..., payload: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class HintOutcome(_message.Message):
    __slots__ = ("action_id", "status", "reason", "tokens", "is_missing")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    status: HintStatus
    reason: str
    tokens: int
    is_missing: bool
    def __init__(self, action_id: _Optional[str] = ..., status: _Optional[_Union[HintStatus, str]] = ..., reason: _Optional[str] = ..., tokens: _Optional[int] = ..., is_missing: bool = ...) -> None: ...
