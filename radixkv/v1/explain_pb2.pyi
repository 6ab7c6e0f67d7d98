from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[MissReason]
    COLD: _ClassVar[MissReason]
    DIVERGED: _ClassVar[MissReason]
    EVICTED: _ClassVar[MissReason]
    EXPIRED: _ClassVar[MissReason]
    READ_DISABLED: _ClassVar[MissReason]
    ADAPTER_CHANGED: _ClassVar[MissReason]
    NOT_LOADED: _ClassVar[MissReason]
    NO_STATE: _ClassVar[MissReason]
    NO_WINDOW: _ClassVar[MissReason]

class DifferenceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNCLASSIFIED: _ClassVar[DifferenceKind]
    RANDOM_ID: _ClassVar[DifferenceKind]
    DATE_OR_TIME: _ClassVar[DifferenceKind]
    NUMBER: _ClassVar[DifferenceKind]
    INSERTED: _ClassVar[DifferenceKind]
    REMOVED: _ClassVar[DifferenceKind]
    REORDERED: _ClassVar[DifferenceKind]
    RETOKENIZED: _ClassVar[DifferenceKind]
    FIRST_TOKEN: _ClassVar[DifferenceKind]
    REPLACED: _ClassVar[DifferenceKind]
NONE: MissReason
COLD: MissReason
DIVERGED: MissReason
EVICTED: MissReason
EXPIRED: MissReason
READ_DISABLED: MissReason
ADAPTER_CHANGED: MissReason
NOT_LOADED: MissReason
NO_STATE: MissReason
NO_WINDOW: MissReason
UNCLASSIFIED: DifferenceKind
RANDOM_ID: DifferenceKind
DATE_OR_TIME: DifferenceKind
NUMBER: DifferenceKind
INSERTED: DifferenceKind
REMOVED: DifferenceKind
REORDERED: DifferenceKind
RETOKENIZED: DifferenceKind
FIRST_TOKEN: DifferenceKind
REPLACED: DifferenceKind

class PromptSegment(_message.Message):
    __slots__ = ("name", "end_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    end_token: int
    def __init__(self, name: _Optional[str] = ..., end_token: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "miss_reason", "left_at_token", "segment", "computed_tokens", "computed_s", "difference")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_AT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    miss_reason: MissReason
    left_at_token: int
    segment: str
    computed_tokens: int
    computed_s: float
    difference: Difference
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., left_at_token: _Optional[int] = ..., segment: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., computed_s: _Optional[float] = ..., difference: _Optional[_Union[Difference, _Mapping]] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("kind", "before_token_ids", "before_text", "prompt", "branch", "prompt_span_tokens", "branch_span_tokens", "lost_tokens", "lost_s", "idle_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEFORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    kind: DifferenceKind
    before_token_ids: _containers.RepeatedScalarFieldContainer[int]
    before_text: str
    prompt: Excerpt
    branch: Excerpt
    prompt_span_tokens: int
    branch_span_tokens: int
    lost_tokens: int
    lost_s: float
    idle_s: float
    def __init__(self, kind: _Optional[_Union[DifferenceKind, str]] = ..., before_token_ids: _Optional[_Iterable[int]] = ..., before_text: _Optional[str] = ..., prompt: _Optional[_Union[Excerpt, _Mapping]] = ..., branch: _Optional[_Union[Excerpt, _Mapping]] = ..., prompt_span_tokens: _Optional[int] = ..., branch_span_tokens: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., lost_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class Excerpt(_message.Message):
    __slots__ = ("token_ids", "different_tokens", "different_text", "equal_text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_TEXT_FIELD_NUMBER: _ClassVar[int]
    EQUAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    different_tokens: int
    different_text: str
    equal_text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., different_tokens: _Optional[int] = ..., different_text: _Optional[str] = ..., equal_text: _Optional[str] = ...) -> None: ...
