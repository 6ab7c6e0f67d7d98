"""What the operator sees: one frozen picture of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.api.result import Usage


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state. `total == free + leased + published`; `pinned` and `retained` are parts of `published`.

    Attributes:
        retainable: how many may be retained.
    """

    total: int
    free: int
    leased: int
    published: int
    pinned: int
    retained: int
    retainable: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Requests by state: four counts of now, and four totals since the start.

    Attributes:
        waiting: for tokens of a step, and for blocks.
        following: they wait for what a running request computes.
        paused: the part of the waiting and following ones that ran before and gave their blocks back.
        pauses: how often that happened.
    """

    waiting: int
    running: int
    following: int
    paused: int
    finished: int
    failed: int
    cancelled: int
    pauses: int


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Totals over finished requests; see `Usage`. `prompt == cached + computed`."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    written: int = 0
    generated: int = 0
    recomputed: int = 0

    def plus(self, usage: Usage) -> TokenStats:
        """With one more request."""
        return TokenStats(
            prompt=self.prompt + usage.prompt_tokens,
            cached=self.cached + usage.cached_tokens,
            computed=self.computed + usage.computed_tokens,
            written=self.written + usage.written_tokens,
            generated=self.generated + usage.generated_tokens,
            recomputed=self.recomputed + usage.recomputed_tokens,
        )


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant holds, what it did, and its bounds; see `TenantUsage` and `Quota`."""

    tenant: str
    cached_blocks: int
    pinned_blocks: int
    leased_blocks: int
    evicted_blocks: int
    hit_tokens: int
    miss_tokens: int
    retained_blocks: int
    floor_blocks: int
    ceiling_blocks: int | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full the engine is: what can be told without a walk through the trees; see `EngineStats`."""

    blocks: BlockStats
    requests: RequestStats
    namespaces: int
    held_leases: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of the engine.

    Attributes:
        namespaces: namespaces with at least one cached token.
        segments: nodes of all radix trees.
        evicted_blocks: total since the start.
        block_bytes: device bytes of one block, scales included.
        kv_dtype: how K and V are stored: fp32, bf16, fp16, fp8, int8 or int4.
        tenants: those with a quota, and the most recent others.
    """

    uptime_s: float
    blocks: BlockStats
    requests: RequestStats
    tokens: TokenStats
    namespaces: int
    segments: int
    held_leases: int
    evicted_blocks: int
    block_bytes: int
    kv_dtype: str
    tenants: tuple[TenantStats, ...]
