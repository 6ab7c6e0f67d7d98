from radixkv.v1 import explain_pb2 as _explain_pb2
from radixkv.v1 import hints_pb2 as _hints_pb2
from radixkv.v1 import prefill_pb2 as _prefill_pb2
from radixkv.v1 import explain_pb2 as _explain_pb2_1
from google.protobuf.internal import containers as _containers
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
NONE: _explain_pb2_1.MissReason
COLD: _explain_pb2_1.MissReason
DIVERGED: _explain_pb2_1.MissReason
EVICTED: _explain_pb2_1.MissReason
EXPIRED: _explain_pb2_1.MissReason
READ_DISABLED: _explain_pb2_1.MissReason
ADAPTER_CHANGED: _explain_pb2_1.MissReason
NOT_LOADED: _explain_pb2_1.MissReason
NO_STATE: _explain_pb2_1.MissReason
NO_WINDOW: _explain_pb2_1.MissReason
UNCLASSIFIED: _explain_pb2_1.DifferenceKind
RANDOM_ID: _explain_pb2_1.DifferenceKind
DATE_OR_TIME: _explain_pb2_1.DifferenceKind
NUMBER: _explain_pb2_1.DifferenceKind
INSERTED: _explain_pb2_1.DifferenceKind
REMOVED: _explain_pb2_1.DifferenceKind
REORDERED: _explain_pb2_1.DifferenceKind
RETOKENIZED: _explain_pb2_1.DifferenceKind
FIRST_TOKEN: _explain_pb2_1.DifferenceKind
REPLACED: _explain_pb2_1.DifferenceKind

class RetainRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt", "retention")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    retention: _prefill_pb2.Retention
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., retention: _Optional[_Union[_prefill_pb2.Retention, _Mapping]] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("retained",)
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    retained: _prefill_pb2.Grant
    def __init__(self, retained: _Optional[_Union[_prefill_pb2.Grant, _Mapping]] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt", "kv_hints")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    KV_HINTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    kv_hints: _hints_pb2.KvHintsEnvelope
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., kv_hints: _Optional[_Union[_hints_pb2.KvHintsEnvelope, _Mapping]] = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("hints",)
    HINTS_FIELD_NUMBER: _ClassVar[int]
    hints: _containers.RepeatedCompositeFieldContainer[_hints_pb2.HintOutcome]
    def __init__(self, hints: _Optional[_Iterable[_Union[_hints_pb2.HintOutcome, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("token_ids", "tenant", "adapter", "salt", "segments", "omit_cached_text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OMIT_CACHED_TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: str
    salt: str
    segments: _containers.RepeatedCompositeFieldContainer[_explain_pb2_1.PromptSegment]
    omit_cached_text: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[_explain_pb2_1.PromptSegment, _Mapping]]] = ..., omit_cached_text: bool = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ("was_known", "blocks")
    WAS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    was_known: bool
    blocks: int
    def __init__(self, was_known: bool = ..., blocks: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "adapter", "salt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    adapter: str
    salt: str
    def __init__(self, tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("freed_blocks", "pinned_blocks", "stores")
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    pinned_blocks: int
    stores: _containers.RepeatedCompositeFieldContainer[DeletedBlocks]
    def __init__(self, freed_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., stores: _Optional[_Iterable[_Union[DeletedBlocks, _Mapping]]] = ...) -> None: ...

class DeletedBlocks(_message.Message):
    __slots__ = ("store", "blocks")
    STORE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store: str
    blocks: int
    def __init__(self, store: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class ListSegmentsRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token", "hottest_first", "store", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    hottest_first: bool
    store: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., hottest_first: bool = ..., store: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ListSegmentsResponse(_message.Message):
    __slots__ = ("segments", "next_page_token", "total_segments", "compared_segments", "stored")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    next_page_token: str
    total_segments: int
    compared_segments: int
    stored: _containers.RepeatedCompositeFieldContainer[StoredNamespace]
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total_segments: _Optional[int] = ..., compared_segments: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[StoredNamespace, _Mapping]]] = ...) -> None: ...

class StoredNamespace(_message.Message):
    __slots__ = ("tenant", "adapter", "namespace_id", "has_salt", "num_blocks", "num_tokens", "adapter_names", "num_retained_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    adapter: str
    namespace_id: int
    has_salt: bool
    num_blocks: int
    num_tokens: int
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    num_retained_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., namespace_id: _Optional[int] = ..., has_salt: bool = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., adapter_names: _Optional[_Iterable[str]] = ..., num_retained_blocks: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("segment_id", "parent_id", "tenant", "adapter", "namespace_id", "has_salt", "start_token", "num_tokens", "num_blocks", "num_children", "num_uses", "idle_s", "heat", "num_leases", "priority", "is_retained", "expires_in_s", "adapter_names", "session_id", "awaits")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_SALT_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    NUM_USES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    HEAT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_RETAINED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    parent_id: int
    tenant: str
    adapter: str
    namespace_id: int
    has_salt: bool
    start_token: int
    num_tokens: int
    num_blocks: int
    num_children: int
    num_uses: int
    idle_s: float
    heat: float
    num_leases: int
    priority: int
    is_retained: bool
    expires_in_s: float
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    session_id: str
    awaits: _hints_pb2.Awaits
    def __init__(self, segment_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., namespace_id: _Optional[int] = ..., has_salt: bool = ..., start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_children: _Optional[int] = ..., num_uses: _Optional[int] = ..., idle_s: _Optional[float] = ..., heat: _Optional[float] = ..., num_leases: _Optional[int] = ..., priority: _Optional[int] = ..., is_retained: bool = ..., expires_in_s: _Optional[float] = ..., adapter_names: _Optional[_Iterable[str]] = ..., session_id: _Optional[str] = ..., awaits: _Optional[_Union[_hints_pb2.Awaits, str]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "replaced_digest")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REPLACED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    replaced_digest: str
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., replaced_digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_adapters")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "rank", "num_bytes", "is_on_device", "is_draining", "unfinished_requests", "cached_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    num_bytes: int
    is_on_device: bool
    is_draining: bool
    unfinished_requests: int
    cached_tokens: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., is_on_device: bool = ..., is_draining: bool = ..., unfinished_requests: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("max_tenants", "tenant", "max_sessions")
    MAX_TENANTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    max_tenants: int
    tenant: str
    max_sessions: int
    def __init__(self, max_tenants: _Optional[int] = ..., tenant: _Optional[str] = ..., max_sessions: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("model", "device", "epoch", "uptime_s", "block_size", "blocks", "requests", "tokens", "namespaces", "segments", "held_leases", "evicted_blocks", "block_bytes", "tenants", "kv_dtype", "first_tokens", "known_tenants", "model_fingerprint", "tiers", "evicted_probation_blocks", "replicas", "states", "parts", "sessions")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TENANTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PROBATION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    device: str
    epoch: int
    uptime_s: float
    block_size: int
    blocks: BlockStats
    requests: RequestStats
    tokens: TokenStats
    namespaces: int
    segments: int
    held_leases: int
    evicted_blocks: int
    block_bytes: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    kv_dtype: str
    first_tokens: TimeStats
    known_tenants: int
    model_fingerprint: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    evicted_probation_blocks: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStats]
    states: StateStats
    parts: PartStats
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    def __init__(self, model: _Optional[str] = ..., device: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., block_size: _Optional[int] = ..., blocks: _Optional[_Union[BlockStats, _Mapping]] = ..., requests: _Optional[_Union[RequestStats, _Mapping]] = ..., tokens: _Optional[_Union[TokenStats, _Mapping]] = ..., namespaces: _Optional[int] = ..., segments: _Optional[int] = ..., held_leases: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., kv_dtype: _Optional[str] = ..., first_tokens: _Optional[_Union[TimeStats, _Mapping]] = ..., known_tenants: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., evicted_probation_blocks: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStats, _Mapping]]] = ..., states: _Optional[_Union[StateStats, _Mapping]] = ..., parts: _Optional[_Union[PartStats, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ("address", "stats", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    stats: StatsResponse
    error: str
    def __init__(self, address: _Optional[str] = ..., stats: _Optional[_Union[StatsResponse, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class StateStats(_message.Message):
    __slots__ = ("snapshots", "max_snapshots", "given_up_snapshots", "recomputed_tokens")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    snapshots: int
    max_snapshots: int
    given_up_snapshots: int
    recomputed_tokens: int
    def __init__(self, snapshots: _Optional[int] = ..., max_snapshots: _Optional[int] = ..., given_up_snapshots: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class PartStats(_message.Message):
    __slots__ = ("free", "needed", "kept", "given_up", "shortened_hits", "lost_tokens")
    FREE_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_HITS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    free: int
    needed: int
    kept: int
    given_up: int
    shortened_hits: int
    lost_tokens: int
    def __init__(self, free: _Optional[int] = ..., needed: _Optional[int] = ..., kept: _Optional[int] = ..., given_up: _Optional[int] = ..., shortened_hits: _Optional[int] = ..., lost_tokens: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "is_working", "blocks", "used_bytes", "capacity_bytes", "loaded_blocks", "loaded_bytes", "missed_blocks", "saved_blocks", "refused_blocks", "evicted_blocks", "computed_blocks", "dropped_blocks", "load_s", "touched_blocks", "rewritten_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    IS_WORKING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    is_working: bool
    blocks: int
    used_bytes: int
    capacity_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    missed_blocks: int
    saved_blocks: int
    refused_blocks: int
    evicted_blocks: int
    computed_blocks: int
    dropped_blocks: int
    load_s: float
    touched_blocks: int
    rewritten_blocks: int
    def __init__(self, tier: _Optional[str] = ..., is_working: bool = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., missed_blocks: _Optional[int] = ..., saved_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., computed_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., load_s: _Optional[float] = ..., touched_blocks: _Optional[int] = ..., rewritten_blocks: _Optional[int] = ...) -> None: ...

class TimeStats(_message.Message):
    __slots__ = ("bounds_s", "counts", "sum_s")
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "cached_blocks", "pinned_blocks", "leased_blocks", "evicted_blocks", "hit_tokens", "miss_tokens", "floor_blocks", "ceiling_blocks", "retained_blocks", "stored_blocks", "sessions")
    class StoredBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cached_blocks: int
    pinned_blocks: int
    leased_blocks: int
    evicted_blocks: int
    hit_tokens: int
    miss_tokens: int
    floor_blocks: int
    ceiling_blocks: int
    retained_blocks: int
    stored_blocks: _containers.ScalarMap[str, int]
    sessions: int
    def __init__(self, tenant: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., miss_tokens: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., ceiling_blocks: _Optional[int] = ..., retained_blocks: _Optional[int] = ..., stored_blocks: _Optional[_Mapping[str, int]] = ..., sessions: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("tenant", "session_id", "awaits", "blocks", "running_requests", "idle_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    awaits: _hints_pb2.Awaits
    blocks: int
    running_requests: int
    idle_s: float
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., awaits: _Optional[_Union[_hints_pb2.Awaits, str]] = ..., blocks: _Optional[int] = ..., running_requests: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...

class BlockStats(_message.Message):
    __slots__ = ("total", "free", "leased", "published", "pinned", "retained", "retainable", "on_probation", "withheld")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    RETAINABLE_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    leased: int
    published: int
    pinned: int
    retained: int
    retainable: int
    on_probation: int
    withheld: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., published: _Optional[int] = ..., pinned: _Optional[int] = ..., retained: _Optional[int] = ..., retainable: _Optional[int] = ..., on_probation: _Optional[int] = ..., withheld: _Optional[int] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("waiting", "running", "finished", "failed", "cancelled", "following", "paused", "pauses")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    finished: int
    failed: int
    cancelled: int
    following: int
    paused: int
    pauses: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., following: _Optional[int] = ..., paused: _Optional[int] = ..., pauses: _Optional[int] = ...) -> None: ...

class TokenStats(_message.Message):
    __slots__ = ("prompt", "cached", "computed", "written", "generated", "recomputed")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    cached: int
    computed: int
    written: int
    generated: int
    recomputed: int
    def __init__(self, prompt: _Optional[int] = ..., cached: _Optional[int] = ..., computed: _Optional[int] = ..., written: _Optional[int] = ..., generated: _Optional[int] = ..., recomputed: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterPublicPrefixRequest(_message.Message):
    __slots__ = ("token_ids", "name", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    name: str
    adapter: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class RegisterPublicPrefixResponse(_message.Message):
    __slots__ = ("public_prefix",)
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    public_prefix: PublicPrefix
    def __init__(self, public_prefix: _Optional[_Union[PublicPrefix, _Mapping]] = ...) -> None: ...

class UnregisterPublicPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnregisterPublicPrefixResponse(_message.Message):
    __slots__ = ("public_prefix",)
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    public_prefix: PublicPrefix
    def __init__(self, public_prefix: _Optional[_Union[PublicPrefix, _Mapping]] = ...) -> None: ...

class ListPublicPrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPublicPrefixesResponse(_message.Message):
    __slots__ = ("public_prefixes",)
    PUBLIC_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    public_prefixes: _containers.RepeatedCompositeFieldContainer[PublicPrefix]
    def __init__(self, public_prefixes: _Optional[_Iterable[_Union[PublicPrefix, _Mapping]]] = ...) -> None: ...

class PublicPrefix(_message.Message):
    __slots__ = ("name", "tokens", "blocks", "is_computed", "users", "uses", "adapter_digest", "adapter_names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    blocks: int
    is_computed: bool
    users: int
    uses: int
    adapter_digest: str
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., is_computed: bool = ..., users: _Optional[int] = ..., uses: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., adapter_names: _Optional[_Iterable[str]] = ...) -> None: ...

class StatementRequest(_message.Message):
    __slots__ = ("tenant", "since", "until", "by_day")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BY_DAY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    since: str
    until: str
    by_day: bool
    def __init__(self, tenant: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., by_day: bool = ...) -> None: ...

class StatementResponse(_message.Message):
    __slots__ = ("since", "until", "covered_s", "lines")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    COVERED_S_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    since: str
    until: str
    covered_s: float
    lines: _containers.RepeatedCompositeFieldContainer[StatementLine]
    def __init__(self, since: _Optional[str] = ..., until: _Optional[str] = ..., covered_s: _Optional[float] = ..., lines: _Optional[_Iterable[_Union[StatementLine, _Mapping]]] = ...) -> None: ...

class StatementLine(_message.Message):
    __slots__ = ("period", "tenant", "requests", "computed_tokens", "generated_tokens", "written_tokens", "device_hit_tokens", "host_hit_tokens", "disk_hit_tokens", "remote_hit_tokens", "host_loaded_tokens", "disk_loaded_tokens", "remote_loaded_tokens", "device_evicted_by_self_tokens", "device_evicted_by_others_tokens", "host_evicted_by_self_tokens", "host_evicted_by_others_tokens", "disk_evicted_by_self_tokens", "disk_evicted_by_others_tokens", "device_token_s", "host_token_s", "disk_token_s", "remote_token_s", "more_hit_tokens_at_twice_ceiling")
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_EVICTED_BY_SELF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_EVICTED_BY_OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_EVICTED_BY_SELF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_EVICTED_BY_OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_EVICTED_BY_SELF_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_EVICTED_BY_OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    MORE_HIT_TOKENS_AT_TWICE_CEILING_FIELD_NUMBER: _ClassVar[int]
    period: str
    tenant: str
    requests: int
    computed_tokens: int
    generated_tokens: int
    written_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    disk_hit_tokens: int
    remote_hit_tokens: int
    host_loaded_tokens: int
    disk_loaded_tokens: int
    remote_loaded_tokens: int
    device_evicted_by_self_tokens: int
    device_evicted_by_others_tokens: int
    host_evicted_by_self_tokens: int
    host_evicted_by_others_tokens: int
    disk_evicted_by_self_tokens: int
    disk_evicted_by_others_tokens: int
    device_token_s: float
    host_token_s: float
    disk_token_s: float
    remote_token_s: float
    more_hit_tokens_at_twice_ceiling: int
    def __init__(self, period: _Optional[str] = ..., tenant: _Optional[str] = ..., requests: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., written_tokens: _Optional[int] = ..., device_hit_tokens: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., disk_hit_tokens: _Optional[int] = ..., remote_hit_tokens: _Optional[int] = ..., host_loaded_tokens: _Optional[int] = ..., disk_loaded_tokens: _Optional[int] = ..., remote_loaded_tokens: _Optional[int] = ..., device_evicted_by_self_tokens: _Optional[int] = ..., device_evicted_by_others_tokens: _Optional[int] = ..., host_evicted_by_self_tokens: _Optional[int] = ..., host_evicted_by_others_tokens: _Optional[int] = ..., disk_evicted_by_self_tokens: _Optional[int] = ..., disk_evicted_by_others_tokens: _Optional[int] = ..., device_token_s: _Optional[float] = ..., host_token_s: _Optional[float] = ..., disk_token_s: _Optional[float] = ..., remote_token_s: _Optional[float] = ..., more_hit_tokens_at_twice_ceiling: _Optional[int] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("tenant", "max_causes", "omit_cached_text")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_CAUSES_FIELD_NUMBER: _ClassVar[int]
    OMIT_CACHED_TEXT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    max_causes: int
    omit_cached_text: bool
    def __init__(self, tenant: _Optional[str] = ..., max_causes: _Optional[int] = ..., omit_cached_text: bool = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("covered_s", "prompts", "prompt_tokens", "cached_tokens", "misses", "missed_tokens", "examined_misses", "examined_tokens", "first_prompts", "causes", "further_causes")
    COVERED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_MISSES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    FURTHER_CAUSES_FIELD_NUMBER: _ClassVar[int]
    covered_s: float
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    misses: int
    missed_tokens: int
    examined_misses: int
    examined_tokens: int
    first_prompts: int
    causes: _containers.RepeatedCompositeFieldContainer[DiagnosedCause]
    further_causes: int
    def __init__(self, covered_s: _Optional[float] = ..., prompts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., misses: _Optional[int] = ..., missed_tokens: _Optional[int] = ..., examined_misses: _Optional[int] = ..., examined_tokens: _Optional[int] = ..., first_prompts: _Optional[int] = ..., causes: _Optional[_Iterable[_Union[DiagnosedCause, _Mapping]]] = ..., further_causes: _Optional[int] = ...) -> None: ...

class DiagnosedCause(_message.Message):
    __slots__ = ("cause", "tenant", "place", "pattern", "prompts", "lost_tokens", "lost_s", "is_upper_bound", "min_position", "max_position", "sample", "what", "change")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    IS_UPPER_BOUND_FIELD_NUMBER: _ClassVar[int]
    MIN_POSITION_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    tenant: str
    place: str
    pattern: str
    prompts: int
    lost_tokens: int
    lost_s: float
    is_upper_bound: bool
    min_position: int
    max_position: int
    sample: MissSample
    what: str
    change: str
    def __init__(self, cause: _Optional[str] = ..., tenant: _Optional[str] = ..., place: _Optional[str] = ..., pattern: _Optional[str] = ..., prompts: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., lost_s: _Optional[float] = ..., is_upper_bound: bool = ..., min_position: _Optional[int] = ..., max_position: _Optional[int] = ..., sample: _Optional[_Union[MissSample, _Mapping]] = ..., what: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class MissSample(_message.Message):
    __slots__ = ("before_token_ids", "before_text", "prompt", "branch", "prompt_span_tokens", "branch_span_tokens")
    BEFORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    before_token_ids: _containers.RepeatedScalarFieldContainer[int]
    before_text: str
    prompt: _explain_pb2_1.Excerpt
    branch: _explain_pb2_1.Excerpt
    prompt_span_tokens: int
    branch_span_tokens: int
    def __init__(self, before_token_ids: _Optional[_Iterable[int]] = ..., before_text: _Optional[str] = ..., prompt: _Optional[_Union[_explain_pb2_1.Excerpt, _Mapping]] = ..., branch: _Optional[_Union[_explain_pb2_1.Excerpt, _Mapping]] = ..., prompt_span_tokens: _Optional[int] = ..., branch_span_tokens: _Optional[int] = ...) -> None: ...
