"""Counts of an engine at one moment, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.api.result import Usage


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state. `total == free + leased + published`; `pinned` and `retained` are parts of `published`.

    Attributes:
        total: blocks of the pool.
        free: blocks that hold nothing.
        leased: blocks that only leases hold.
        published: blocks that can be matched.
        pinned: published blocks that leases keep from eviction.
        retained: published blocks with a retention priority above the default.
        retainable: the most blocks that may be retained.
    """

    total: int
    free: int
    leased: int
    published: int
    pinned: int
    retained: int
    retainable: int

    @property
    def in_use(self) -> int:
        """Blocks that can't be evicted now: those of running requests and held leases."""
        return self.leased + self.pinned


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Requests by state: four counts of now, and four totals since the start.

    Attributes:
        waiting: requests that wait for tokens of a step or for blocks.
        running: requests that hold blocks.
        following: requests that wait for what a running one computes.
        paused: the part of the waiting and following ones that ran before and gave their blocks back.
        finished, failed, cancelled: requests that are over.
        pauses: number of times that a running request gave its blocks back.
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
    """Totals of `Usage` over finished requests. `prompt == cached + computed`."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    written: int = 0
    generated: int = 0
    recomputed: int = 0

    def plus(self, usage: Usage) -> TokenStats:
        """Return the totals with one more request."""
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
    """The blocks of one tenant, its totals and its bounds; see `TenantUsage` and `Quota`."""

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
    """Load of the engine: the counts that need no walk through the trees.

    Attributes:
        blocks: blocks by state.
        requests: requests by state.
        namespaces: namespaces with at least one cached token.
        held_leases: leases that outlive their request.
        evicted_blocks: total since the start.
    """

    blocks: BlockStats
    requests: RequestStats
    namespaces: int
    held_leases: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """All counts of the engine at one moment.

    Attributes:
        load: how full it is.
        uptime_s: seconds since its start.
        tokens: totals over finished requests.
        segments: nodes of all radix trees.
        block_bytes: device bytes of one block, scales included.
        kv_dtype: how K and V are stored: fp32, bf16, fp16, fp8, int8 or int4.
        tenants: all tenants with a quota, and the most recent others.
    """

    load: EngineLoad
    uptime_s: float
    tokens: TokenStats
    segments: int
    block_bytes: int
    kv_dtype: str
    tenants: tuple[TenantStats, ...]
