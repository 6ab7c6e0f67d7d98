import numpy as np
import pytest

from radixkv.cache.lease import Lease
from radixkv.cache.part_memory import PartMemory
from radixkv.cache.part_share import PartShare
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.errors import OutOfBlocks, QuotaExceeded
from radixkv.namespace import Namespace

MODEL = Namespace("model")
SIZE, STEP_TOKENS, REACH = 4, 8, Reach(7)
OWN = min_parts(REACH, SIZE, STEP_TOKENS)


def cache_of(num_blocks: int, part_bytes: int = 5, block_bytes: int = 1) -> tuple[PrefixCache, WindowPool]:
    """A cache with the memory of `num_blocks` blocks of all layers. The tenant `acme` has a quota."""
    num_more = (num_blocks * (part_bytes + block_bytes) - OWN * part_bytes) // block_bytes
    pool = WindowPool(num_more, num_blocks, SIZE, REACH, STEP_TOKENS, PartMemory(part_bytes, block_bytes, OWN))
    return PrefixCache(num_more, SIZE, quotas={"acme": Quota()}, windows=WindowedLayers([pool])), pool


def text(seed: int, num_tokens: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype("<u4").tobytes()


def compute(lease: Lease) -> int:
    """Compute and publish a prompt step by step. Returns its cached tokens."""
    start = lease.cached_tokens
    while start < lease.num_tokens:
        end = min(start + STEP_TOKENS, lease.num_tokens)
        for holder in lease.windows:
            holder.cover(lease.block_ids, start, end, lease.copy)
            holder.settle(end)
        lease.copy = None
        lease.commit(end)
        start = end
    return lease.cached_tokens


def ask(cache: PrefixCache, tokens: bytes) -> int:
    with cache.lease(MODEL, tokens) as lease:
        found = compute(lease)
    cache.check()
    return found


def test_prompts_that_recur_whole_end_up_with_their_ends_only() -> None:
    cache, pool = cache_of(60)
    prompts = [text(seed, 100) for seed in range(6)]  # 25 blocks each: one pool would hold two of them
    for _ in range(10):
        found = [ask(cache, prompt) for prompt in prompts]
    assert found == [99] * 6
    assert pool.num_withheld_blocks == PartMemory(5, 1, OWN).num_blocks(pool.num_parts - pool.num_free)


def test_prompts_that_are_cut_anywhere_keep_windows_in_between() -> None:
    cache, _ = cache_of(60)
    dice, found, asked = np.random.default_rng(1), 0, 0
    for _ in range(300):
        prompt = text(int(dice.integers(2)), 100)[: 4 * int(dice.integers(20, 101))]
        found, asked = found + ask(cache, prompt), asked + len(prompt) // 4
    assert found / asked > 0.9


def test_a_prompt_fits_alone_whatever_is_cached() -> None:
    cache, _ = cache_of(60)
    for seed in range(5):
        ask(cache, text(seed, 100))
    with cache.lease(MODEL, text(9, SIZE * cache.pool.num_blocks)) as lease:
        compute(lease)
        cache.check()
    with pytest.raises(OutOfBlocks):
        cache.lease(MODEL, text(9, SIZE * cache.pool.num_blocks + 1))


def test_a_public_prefix_makes_room_for_its_parts() -> None:
    cache, pool = cache_of(60)
    prefix = cache.public.register("system", "model", "", text(8, 24))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        compute(lease)
    for seed in range(5):
        ask(cache, text(seed, 100))
    if cache.match(prefix.namespace, prefix.tokens).cached_tokens < 23:
        with cache.lease(prefix.namespace, prefix.tokens) as lease:
            compute(lease)
    cache.public.activate(prefix)
    cache.check()
    assert pool.num_lasting == 6
    assert ask(cache, prefix.tokens + text(7, 8)) == 24


def test_a_tenant_at_its_ceiling_exceeds_its_quota_whatever_memory_parts_have() -> None:
    cache, _ = cache_of(60)
    for seed in range(6):
        ask(cache, text(seed, 100))
    ceiling = cache.pool.num_free + cache.num_evictable_blocks  # without the memory of parts, which could be evicted
    assert cache.windows.num_returnable_blocks > 1
    cache.tenants["acme"].quota = Quota(ceiling_blocks=ceiling)
    with pytest.raises(QuotaExceeded):
        cache.lease(Namespace("model", "acme"), text(9, (ceiling + 1) * SIZE))


def test_the_bound_follows_what_is_missed() -> None:
    share = PartShare(num_blocks=100, block_size=4, memory=PartMemory(5, 1, 10))
    first = share.max_parts
    share.record_missed_parts(10, num_passed_parts=5)
    assert share.max_parts > first
    share.record_missed_parts(10_000, num_passed_parts=5)
    assert share.max_parts == 25, "what passed parts would take in one pool: five sixths of 150 bytes, at five each"
