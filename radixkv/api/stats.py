"""Counts of an engine at one moment, as operators see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.api.result import Usage

DEFAULT_MAX_TENANTS = 100  # told by statistics, unless more or fewer are asked for


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state. `total == free + leased + published`; `pinned`, `retained`, `on_probation` are in `published`.

    Attributes:
        total: blocks of the pool.
        free: blocks that hold nothing.
        leased: blocks that only leases hold.
        published: blocks that can be matched.
        pinned: published blocks that leases keep from eviction.
        retained: published blocks with a retention priority above the default.
        retainable: the most blocks that may be retained.
        on_probation: blocks of prompts that came once and that no lease uses, while there is a probation.
    """

    total: int
    free: int
    leased: int
    published: int
    pinned: int
    retained: int
    retainable: int
    on_probation: int

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
class TimeStats:
    """Times counted in buckets, since the start.

    Attributes:
        bounds_s: the largest time of each bucket but the last, which has none; ascending.
        counts: times in each bucket.
        sum_s: all times together.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum_s: float = 0.0

    def since(self, before: TimeStats) -> TimeStats:
        """Return what came after an earlier reading of the same times."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return TimeStats(self.bounds_s, counts, self.sum_s - before.sum_s)

    def quantile_s(self, share: float) -> float | None:
        """Estimate the time that this share of the times did not exceed, evenly spread in each bucket; None of none.

        >>> TimeStats((1.0, 2.0), (1, 2, 0)).quantile_s(2 / 3)
        1.5
        """
        rank, num_below = share * sum(self.counts), 0
        lowest_s = 0.0
        for count, highest_s in zip(self.counts, (*self.bounds_s, None), strict=True):
            if count and num_below + count >= rank:
                return lowest_s if highest_s is None else lowest_s + (highest_s - lowest_s) * (rank - num_below) / count
            num_below += count
            lowest_s = lowest_s if highest_s is None else highest_s
        return None


@dataclass(frozen=True, slots=True)
class TenantStats:
    """The blocks of one tenant, its totals and its bounds; see `TenantUsage` and `Quota`.

    `stored_blocks` are those in each store below the device, of shared ones those that are known.
    """

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
    stored_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StateStats:
    """Snapshots of the states of a model that keeps some for each sequence: two counts of now, two totals.

    Attributes:
        snapshots: snapshots that are kept.
        max_snapshots: the most that may be kept.
        given_up_snapshots: those that were given up for others.
        recomputed_tokens: cached tokens that were computed again, since the last snapshot was before them.
    """

    snapshots: int = 0
    max_snapshots: int = 0
    given_up_snapshots: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PartStats:
    """Parts of blocks, for windowed layers with a pool of their own: three counts of now, three totals.

    Attributes:
        free: parts that no block has.
        needed: parts that running requests, held leases or public prefixes need.
        kept: parts that nobody needs, and that stay for other prompts.
        given_up: kept parts that were taken for others.
        shortened_hits: leases that could reuse less than the device has, since parts within reach were gone.
        lost_tokens: the tokens that they could not reuse.
    """

    free: int = 0
    needed: int = 0
    kept: int = 0
    given_up: int = 0
    shortened_hits: int = 0
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of the engine: the counts that need no walk through the trees.

    Attributes:
        blocks: blocks by state.
        requests: requests by state.
        namespaces: namespaces with at least one cached token.
        held_leases: leases that outlive their request.
        evicted_blocks: total since the start.
        evicted_probation_blocks: those of them that were on probation.
        states: snapshots of states; None for a model without.
        parts: of blocks; None where all layers are in one pool.
    """

    blocks: BlockStats
    requests: RequestStats
    namespaces: int
    held_leases: int
    evicted_blocks: int
    evicted_probation_blocks: int
    states: StateStats | None = None
    parts: PartStats | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of one store below the device: what it holds, and totals since the start.

    Attributes:
        tier: its name.
        is_working: False while it is left alone after failures, and if it could not be opened.
        blocks, used_bytes, capacity_bytes: None where only the store's own server knows.
        loaded_blocks: blocks that it gave, whole and verified.
        loaded_bytes: their K and V.
        load_s: seconds from the calls for blocks to the answers: with `loaded_bytes`, its bandwidth.
        missed_blocks: blocks that it was asked for and did not give: gone, late, damaged.
        computed_blocks: blocks that it has and that were computed again, because that was supposed to be faster.
        saved_blocks: blocks that it took.
        refused_blocks: blocks that it was given and did not take.
        dropped_blocks: blocks that it was not given because too many waited for it.
        evicted_blocks: blocks that it gave up for others.
    """

    tier: str
    is_working: bool
    blocks: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    loaded_blocks: int
    loaded_bytes: int
    load_s: float
    missed_blocks: int
    computed_blocks: int
    saved_blocks: int
    refused_blocks: int
    dropped_blocks: int
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
        tenants: the largest tenants, as many as were asked for; or the one that was.
        known_tenants: number of tenants with a quota, and of others that hold something or were here lately.
        first_tokens: from the arrival of a request to its first token; of all that had one, whatever their end.
    """

    load: EngineLoad
    uptime_s: float
    tokens: TokenStats
    segments: int
    block_bytes: int
    kv_dtype: str
    tenants: tuple[TenantStats, ...]
    known_tenants: int
    first_tokens: TimeStats = TimeStats()
