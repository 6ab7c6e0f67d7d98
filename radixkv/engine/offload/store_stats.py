"""Statistics of a store, as callers see them."""

from __future__ import annotations

from radixkv.api.stats import TierStats
from radixkv.storage.tiers.block_store import PutOutcome
from radixkv.storage.tiers.tier import Tier


def stats_of(tier: Tier, num_computed_blocks: int, num_dropped_blocks: int) -> TierStats:
    """Count what a store holds and did. Any thread may ask.

    Args:
        tier: the store.
        num_computed_blocks: blocks that it had and that were computed, since that was faster.
        num_dropped_blocks: blocks that it was not given because too many copies waited.
    """
    size, counts = tier.size(), tier.counts()
    refused = sum(counts.saved.get(outcome, 0) for outcome in (PutOutcome.NO_ROOM, PutOutcome.TOO_LARGE))
    return TierStats(
        tier=tier.name,
        is_working=tier.is_working(),
        blocks=size.num_objects,
        used_bytes=size.used_bytes,
        capacity_bytes=size.capacity_bytes,
        loaded_blocks=counts.loaded,
        loaded_bytes=counts.loaded_bytes,
        load_s=counts.load_s,
        missed_blocks=sum(counts.misses.values()),
        computed_blocks=num_computed_blocks,
        saved_blocks=counts.saved.get(PutOutcome.STORED, 0),
        refused_blocks=counts.failed_saves + refused,
        dropped_blocks=num_dropped_blocks,
        evicted_blocks=counts.evicted,
    )


def stats_of_closed(name: str) -> TierStats:
    """Count nothing, of a store that could not be opened."""
    return TierStats(
        tier=name,
        is_working=False,
        blocks=0,
        used_bytes=0,
        capacity_bytes=0,
        loaded_blocks=0,
        loaded_bytes=0,
        load_s=0.0,
        missed_blocks=0,
        computed_blocks=0,
        saved_blocks=0,
        refused_blocks=0,
        dropped_blocks=0,
        evicted_blocks=0,
    )
