"""Statistics of an engine, as operators see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.api.awaits import Awaits
from radixkv.api.result import Usage

DEFAULT_MAX_TENANTS = 100  # in statistics, unless the caller requests another number


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state.

    `total == free + withheld + leased + published`. `pinned`, `retained` and `on_probation` are parts of `published`.

    Attributes:
        total: blocks of the pool.
        free: blocks without an owner that can be allocated.
        leased: blocks that belong to leases and to no tree.
        published: blocks that can be matched.
        pinned: published blocks that leases keep from eviction.
        retained: published blocks with a retention priority above the default, and the blocks before them.
        retainable: maximum number of retained blocks.
        on_probation: blocks of prompts that were used only once and that no lease uses, if there is a probation.
        withheld: blocks without an owner that cannot be allocated, since layers with sliding windows use their memory.
    """

    total: int
    free: int
    leased: int
    published: int
    pinned: int
    retained: int
    retainable: int
    on_probation: int
    withheld: int = 0

    @property
    def in_use(self) -> int:
        """Blocks that cannot be evicted now: those of running requests and held leases."""
        return self.leased + self.pinned


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Requests by state: four current counts, and four totals since the start. The fields have the protocol's names.

    Attributes:
        waiting: requests that wait to be admitted.
        running: requests with blocks.
        following: requests that wait for tokens that a running request computes, or for blocks that are being loaded
            from a tier.
        paused: waiting and following requests that were preempted.
        finished, failed, cancelled: requests that have ended.
        pauses: number of preemptions.
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
    """A histogram of durations since the start.

    Attributes:
        bounds_s: upper bounds of all buckets but the last, which has none; ascending.
        counts: durations in each bucket.
        sum_s: sum of all durations.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum_s: float = 0.0

    def since(self, before: TimeStats) -> TimeStats:
        """Return the difference from an earlier reading of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return TimeStats(self.bounds_s, counts, self.sum_s - before.sum_s)

    def quantile_s(self, share: float) -> float | None:
        """Estimate a quantile, assuming an even distribution in each bucket; None if there are no durations.

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
    """The blocks of one tenant, its totals and its bounds; see `TenantUsage` and `Quota` in `radixkv.cache.tenants`.

    `stored_blocks` counts the blocks in each tier; in shared stores, only those that are known to this server.
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
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class SessionStats:
    """A session of a tenant.

    Attributes:
        tenant, session_id: its names.
        awaits: what it waits for since its last request ended.
        blocks: blocks on the device that only this session has used.
        running_requests: its open leases: those of running requests, held ones, and those that only load blocks.
        idle_s: seconds since a request of it last began or ended.
    """

    tenant: str
    session_id: str
    awaits: Awaits
    blocks: int
    running_requests: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class StateStats:
    """Snapshots of recurrent states: two current counts, and two totals.

    Attributes:
        snapshots: number of snapshots.
        max_snapshots: maximum number of snapshots.
        given_up_snapshots: snapshots that were evicted.
        recomputed_tokens: cached tokens that were computed again, because the last snapshot was before them.
    """

    snapshots: int = 0
    max_snapshots: int = 0
    given_up_snapshots: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PartStats:
    """Parts of blocks in the pool of windowed layers: three current counts, and three totals.

    Attributes:
        free: parts without a block.
        needed: parts that running requests, held leases or public prefixes need.
        kept: parts that are cached for other prompts.
        given_up: cached parts that were evicted.
        shortened_hits: requests that could reuse less than is cached on the device, because parts were evicted.
        lost_tokens: cached tokens that these requests could not reuse.
    """

    free: int = 0
    needed: int = 0
    kept: int = 0
    given_up: int = 0
    shortened_hits: int = 0
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of the engine: the statistics that are not about single tenants, and cheap to read.

    Attributes:
        blocks: blocks by state.
        requests: requests by state.
        namespaces: radix trees: one per namespace with cached tokens, and further ones below public prefixes.
        held_leases: held leases.
        evicted_blocks: total since the start.
        evicted_probation_blocks: evicted blocks that were on probation.
        states: snapshots of recurrent states; None for a model without them.
        parts: parts of blocks of windowed layers; None if all layers are in one pool.
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
    """Statistics of one tier: its contents, and totals since the start.

    Attributes:
        tier: its name.
        is_working: False while it is disabled after failures, and if it could not be opened.
        blocks, used_bytes, capacity_bytes: None if only the server of the store knows them.
        loaded_blocks: blocks that were loaded completely and verified.
        loaded_bytes: bytes of their K/V.
        load_s: seconds from the requests for blocks to the responses; with `loaded_bytes`, the bandwidth.
        missed_blocks: blocks that were requested but not loaded, because they were evicted, too late or damaged.
        computed_blocks: stored blocks that were computed again, because that was estimated to be faster.
        saved_blocks: blocks that were saved.
        refused_blocks: blocks that the tier refused.
        dropped_blocks: blocks that were not sent to the tier because too many were waiting.
        evicted_blocks: blocks that the tier evicted.
        touched_blocks: blocks that were used on the device, and whose recency a shared store updated.
        rewritten_blocks: blocks that were used on the device and queued to be written again, because a shared store had
            evicted them.
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
    touched_blocks: int = 0
    rewritten_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """All statistics of the engine.

    Attributes:
        load: its load.
        uptime_s: seconds since its start.
        tokens: totals over finished requests.
        segments: nodes of all radix trees.
        block_bytes: device bytes of one block, scales included.
        kv_dtype: how K and V are stored: fp32, bf16, fp16, fp8, int8 or k8v4.
        tenants: the largest tenants, as many as requested, or the requested one.
        known_tenants: number of tenants with a quota, and of others that have blocks or were active recently.
        first_tokens: from the arrival of a request to its first token; of all requests with a token.
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
