"""The section of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import OneOf, Range, require_fields

KV_DTYPES = ("auto", "bf16", "fp8", "int8", "int4")
EVICTION_POLICIES = ("adaptive", "lru", "slru", "lfu", "priority")
MAX_BLOCKS = 2**31 - 1  # block ids are int32

STATE_SHARE = 0.1  # of the memory of K and V, which snapshots take without `state_bytes`

_DEFAULT_CAPACITY_TOKENS = 131_072

_Share = Annotated[float, Range(0, 1)]
_Count = Annotated[int, Range(0)]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool, and the rules for what stays in it.

    Attributes:
        block_size: tokens of a block; 16, 32 or 64.
        capacity_tokens: tokens that the pool holds; rounded down to whole blocks. Where windowed layers hold fewer, the
            pool takes the same memory, and the other layers hold more. Without it, a GPU's pool is as large as
            `memory_share` allows, and on a CPU it holds 131,072.
        windowed_tokens: tokens that layers with a sliding window hold in a pool of their own; rounded down to whole
            blocks. 0 lets them hold every token, as other layers do. Without it the window decides, and they hold every
            token where something else needs that, or a window of 2,048 tokens and more leaves nothing to gain.
        memory_share: part of a GPU's memory that weights, steps, pool and other programs may use together, 0 to 1.
        kv_dtype: format of stored K and V: `auto`, `bf16`, `fp8`, `int8` or `int4`. `auto` is the model's own dtype;
            fp8, int8 and int4 have a scale for each token and head.
        evicted_prefixes: number of evicted prefixes that are remembered to explain later misses.
        policy: order in which unused blocks are evicted: `adaptive`, `lru`, `slru`, `lfu` or `priority`.
        max_retained_share: part of the pool that may have a priority above the default, 0 to 1.
        max_held_share: part of the pool that held leases may keep, 0 to 1.
        max_public_share: part of the pool that public prefixes may take, 0 to 1; 0 for none.
        probation_share: part of the pool that prompts that came once may take before they are evicted ahead of all that
            was reused, 0 to 1. With 1 the policy alone decides.
        state_bytes: memory for snapshots of models that keep a state for each sequence, beside the states of running
            requests. Without it, a tenth of what K and V take, and at least 64 snapshots.
        state_every_tokens: tokens between snapshots of a long prompt; rounded down to whole blocks, at least one.
    """

    block_size: Annotated[int, OneOf(16, 32, 64)] = 64
    capacity_tokens: int | None = None
    windowed_tokens: Annotated[int, Range(0)] | None = None
    memory_share: _Share = 0.9
    kv_dtype: Annotated[str, OneOf(*KV_DTYPES)] = "auto"
    evicted_prefixes: _Count = 65_536
    policy: Annotated[str, OneOf(*EVICTION_POLICIES)] = "adaptive"
    max_retained_share: _Share = 0.2
    max_held_share: _Share = 0.5
    max_public_share: _Share = 0.25
    probation_share: _Share = 0.5
    state_bytes: Annotated[int, Range(0, 2**63 - 1)] | None = None
    state_every_tokens: Annotated[int, Range(1)] = 512

    def __post_init__(self) -> None:
        require_fields("cache", self)
        if self.capacity_tokens is not None:
            Range(self.block_size, MAX_BLOCKS * self.block_size).require("cache.capacity_tokens", self.capacity_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, where its size does not depend on a GPU's memory."""
        capacity_tokens = _DEFAULT_CAPACITY_TOKENS if self.capacity_tokens is None else self.capacity_tokens
        return capacity_tokens // self.block_size
