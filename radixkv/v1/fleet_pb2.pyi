from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTED_BY_LOAD: _ClassVar[RouteReason]
    ROUTED_BY_PREFIX: _ClassVar[RouteReason]
    ROUTED_AWAY: _ClassVar[RouteReason]
    ROUTED_TO_NEW_HOME: _ClassVar[RouteReason]
ROUTED_BY_LOAD: RouteReason
ROUTED_BY_PREFIX: RouteReason
ROUTED_AWAY: RouteReason
ROUTED_TO_NEW_HOME: RouteReason

class RouteRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt", "avoid")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    avoid: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., avoid: _Optional[_Iterable[str]] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("address", "reason", "cached_tokens", "most_cached_tokens", "queue_tokens", "num_replicas")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    address: str
    reason: RouteReason
    cached_tokens: int
    most_cached_tokens: int
    queue_tokens: int
    num_replicas: int
    def __init__(self, address: _Optional[str] = ..., reason: _Optional[_Union[RouteReason, str]] = ..., cached_tokens: _Optional[int] = ..., most_cached_tokens: _Optional[int] = ..., queue_tokens: _Optional[int] = ..., num_replicas: _Optional[int] = ...) -> None: ...
