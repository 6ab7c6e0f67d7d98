import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from radixkv.v1 import explain_pb2 as _explain_pb2
from radixkv.v1 import hints_pb2 as _hints_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union
from radixkv.v1.explain_pb2 import PromptSegment as PromptSegment
from radixkv.v1.explain_pb2 import ExplainResponse as ExplainResponse
from radixkv.v1.explain_pb2 import Difference as Difference
from radixkv.v1.explain_pb2 import Excerpt as Excerpt
from radixkv.v1.explain_pb2 import MissReason as MissReason
from radixkv.v1.explain_pb2 import DifferenceKind as DifferenceKind

DESCRIPTOR: _descriptor.FileDescriptor
NONE: _explain_pb2.MissReason
COLD: _explain_pb2.MissReason
DIVERGED: _explain_pb2.MissReason
EVICTED: _explain_pb2.MissReason
EXPIRED: _explain_pb2.MissReason
READ_DISABLED: _explain_pb2.MissReason
ADAPTER_CHANGED: _explain_pb2.MissReason
NOT_LOADED: _explain_pb2.MissReason
NO_STATE: _explain_pb2.MissReason
NO_WINDOW: _explain_pb2.MissReason
UNCLASSIFIED: _explain_pb2.DifferenceKind
RANDOM_ID: _explain_pb2.DifferenceKind
DATE_OR_TIME: _explain_pb2.DifferenceKind
NUMBER: _explain_pb2.DifferenceKind
INSERTED: _explain_pb2.DifferenceKind
REMOVED: _explain_pb2.DifferenceKind
REORDERED: _explain_pb2.DifferenceKind
RETOKENIZED: _explain_pb2.DifferenceKind
FIRST_TOKEN: _explain_pb2.DifferenceKind
REPLACED: _explain_pb2.DifferenceKind

class CompressionPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_POLICY_UNSPECIFIED: _ClassVar[CompressionPolicy]
    STREAMING_LLM: _ClassVar[CompressionPolicy]
    H2O: _ClassVar[CompressionPolicy]
    SNAPKV: _ClassVar[CompressionPolicy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNFINISHED: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
COMPRESSION_POLICY_UNSPECIFIED: CompressionPolicy
STREAMING_LLM: CompressionPolicy
H2O: CompressionPolicy
SNAPKV: CompressionPolicy
UNFINISHED: FinishReason
STOP: FinishReason
LENGTH: FinishReason

class PrefillRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt", "request_id", "read_cache", "write_cache", "retention", "top_logprobs", "return_logits", "hold_lease", "priority", "return_block_table", "session_id", "awaits", "kv_hints", "explain", "omit_cached_text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    READ_CACHE_FIELD_NUMBER: _ClassVar[int]
    WRITE_CACHE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    HOLD_LEASE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETURN_BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    OMIT_CACHED_TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    request_id: str
    read_cache: bool
    write_cache: bool
    retention: Retention
    top_logprobs: int
    return_logits: bool
    hold_lease: bool
    priority: int
    return_block_table: bool
    session_id: str
    awaits: _hints_pb2.Awaits
    kv_hints: _hints_pb2.KvHintsEnvelope
    explain: bool
    omit_cached_text: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., request_id: _Optional[str] = ..., read_cache: bool = ..., write_cache: bool = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., return_logits: bool = ..., hold_lease: bool = ..., priority: _Optional[int] = ..., return_block_table: bool = ..., session_id: _Optional[str] = ..., awaits: _Optional[_Union[_hints_pb2.Awaits, str]] = ..., kv_hints: _Optional[_Union[_hints_pb2.KvHintsEnvelope, _Mapping]] = ..., explain: bool = ..., omit_cached_text: bool = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("request_id", "usage", "next_token_id", "top_logprobs", "logits", "miss_reason", "timing", "lease_id", "lease_expires_at", "block_table", "block_size", "epoch", "retained", "hints", "explanation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    usage: Usage
    next_token_id: int
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    logits: bytes
    miss_reason: _explain_pb2.MissReason
    timing: Timing
    lease_id: str
    lease_expires_at: _timestamp_pb2.Timestamp
    block_table: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    epoch: int
    retained: Grant
    hints: _containers.RepeatedCompositeFieldContainer[_hints_pb2.HintOutcome]
    explanation: _explain_pb2.ExplainResponse
    def __init__(self, request_id: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., next_token_id: _Optional[int] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., logits: _Optional[bytes] = ..., miss_reason: _Optional[_Union[_explain_pb2.MissReason, str]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., lease_id: _Optional[str] = ..., lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., block_table: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., epoch: _Optional[int] = ..., retained: _Optional[_Union[Grant, _Mapping]] = ..., hints: _Optional[_Iterable[_Union[_hints_pb2.HintOutcome, _Mapping]]] = ..., explanation: _Optional[_Union[_explain_pb2.ExplainResponse, _Mapping]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "ttl", "start_token", "end_token", "renew")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl: _duration_pb2.Duration
    start_token: int
    end_token: int
    renew: bool
    def __init__(self, priority: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., renew: bool = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("granted_tokens", "refused_tokens", "uncached_tokens", "expires_at")
    GRANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    granted_tokens: int
    refused_tokens: int
    uncached_tokens: int
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, granted_tokens: _Optional[int] = ..., refused_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prefill", "max_new_tokens", "temperature", "top_p", "seed", "stop_token_ids", "ignore_eos", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "logprobs", "n", "stop", "prompt_logprobs", "json_schema", "regex", "grammar", "json_object", "kv_source", "compression", "write_generated", "tool_call_begin")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    WRITE_GENERATED_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_BEGIN_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillRequest
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    n: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    json_object: bool
    kv_source: KVSource
    compression: Compression
    write_generated: bool
    tool_call_begin: str
    def __init__(self, prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., json_object: bool = ..., kv_source: _Optional[_Union[KVSource, _Mapping]] = ..., compression: _Optional[_Union[Compression, _Mapping]] = ..., write_generated: bool = ..., tool_call_begin: _Optional[str] = ...) -> None: ...

class Compression(_message.Message):
    __slots__ = ("policy", "max_tokens", "num_sinks", "window")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SINKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    policy: CompressionPolicy
    max_tokens: int
    num_sinks: int
    window: int
    def __init__(self, policy: _Optional[_Union[CompressionPolicy, str]] = ..., max_tokens: _Optional[int] = ..., num_sinks: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class KVSource(_message.Message):
    __slots__ = ("address", "lease_id", "epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    lease_id: str
    epoch: int
    def __init__(self, address: _Optional[str] = ..., lease_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "finished", "finish_reason", "usage", "request_id", "miss_reason", "timing", "retained", "logprobs", "index", "matched_stop", "prompt_logprobs", "hints", "explanation")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    miss_reason: _explain_pb2.MissReason
    timing: Timing
    retained: Grant
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    index: int
    matched_stop: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    hints: _containers.RepeatedCompositeFieldContainer[_hints_pb2.HintOutcome]
    explanation: _explain_pb2.ExplainResponse
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., request_id: _Optional[str] = ..., miss_reason: _Optional[_Union[_explain_pb2.MissReason, str]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., retained: _Optional[_Union[Grant, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., index: _Optional[int] = ..., matched_stop: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., hints: _Optional[_Iterable[_Union[_hints_pb2.HintOutcome, _Mapping]]] = ..., explanation: _Optional[_Union[_explain_pb2.ExplainResponse, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "computed_tokens", "written_tokens", "generated_tokens", "recomputed_tokens", "public_tokens", "device_tokens", "host_tokens", "disk_tokens", "remote_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    public_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    remote_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., written_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., public_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_us", "prefill_us", "total_us", "decode_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    prefill_us: int
    total_us: int
    decode_us: int
    def __init__(self, queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., total_us: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("cached_tokens", "prompt_tokens", "miss_reason", "stored_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    prompt_tokens: int
    miss_reason: _explain_pb2.MissReason
    stored_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., miss_reason: _Optional[_Union[_explain_pb2.MissReason, str]] = ..., stored_tokens: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_expires_at",)
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    lease_expires_at: _timestamp_pb2.Timestamp
    def __init__(self, lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class FetchKVRequest(_message.Message):
    __slots__ = ("lease_id", "tenant", "epoch", "first_block", "first_layer", "num_layers", "stores")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    epoch: int
    first_block: int
    first_layer: int
    num_layers: int
    stores: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., stores: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchKVResponse(_message.Message):
    __slots__ = ("format", "block", "data", "handle")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    format: KVFormat
    block: int
    data: bytes
    handle: KVHandle
    def __init__(self, format: _Optional[_Union[KVFormat, _Mapping]] = ..., block: _Optional[int] = ..., data: _Optional[bytes] = ..., handle: _Optional[_Union[KVHandle, _Mapping]] = ...) -> None: ...

class KVHandle(_message.Message):
    __slots__ = ("store", "key")
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    store: str
    key: bytes
    def __init__(self, store: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class KVFormat(_message.Message):
    __slots__ = ("fingerprint", "model_fingerprint", "dtype", "kv_dtype", "layout", "block_size", "block_bytes", "num_blocks", "epoch", "num_layers", "first_layer", "sent_layers", "sent_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    SENT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    model_fingerprint: str
    dtype: str
    kv_dtype: str
    layout: str
    block_size: int
    block_bytes: int
    num_blocks: int
    epoch: int
    num_layers: int
    first_layer: int
    sent_layers: int
    sent_bytes: int
    def __init__(self, fingerprint: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., epoch: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_layer: _Optional[int] = ..., sent_layers: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...
