import numpy as np
import pytest

from radixkv.cache.lease import Lease
from radixkv.cache.part_memory import PartMemory, PartShare
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.errors import OutOfBlocks, QuotaExceeded
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

MODEL = Namespace("model")
BLOCK_SIZE, STEP_TOKENS, REACH = 4, 8, Reach(7)
NUM_DEDICATED_PARTS = min_parts(REACH, BLOCK_SIZE, STEP_TOKENS)


def cache_of(num_blocks: int, part_bytes: int = 5, block_bytes: int = 1) -> tuple[PrefixCache, WindowPool]:
    """Return a cache and its window pool, with as much memory as `num_blocks` blocks take if each has its part.

    The tenant `acme` has a quota.
    """
    num_shared_bytes = num_blocks * (part_bytes + block_bytes) - NUM_DEDICATED_PARTS * part_bytes
    num_pool_blocks = num_shared_bytes // block_bytes
    memory = PartMemory(part_bytes, block_bytes, NUM_DEDICATED_PARTS)
    pool = WindowPool(num_pool_blocks, num_blocks, BLOCK_SIZE, REACH, STEP_TOKENS, memory)
    return PrefixCache(num_pool_blocks, BLOCK_SIZE, quotas={"acme": Quota()}, windows=WindowedLayers([pool])), pool


def random_prompt(seed: int, num_tokens: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype("<u4").tobytes()


def compute(lease: Lease) -> int:
    """Compute and publish a prompt step by step. Returns its cached tokens."""
    start = lease.cached_tokens
    while start < lease.num_tokens:
        end = min(start + STEP_TOKENS, lease.num_tokens)
        for window_lease in lease.windows:
            window_lease.cover(lease.block_ids, start, end, lease.copy)
            window_lease.settle(end)
        lease.copy = None
        lease.commit(end)
        start = end
    return lease.cached_tokens


def serve(cache: PrefixCache, tokens: bytes) -> int:
    """Compute and publish a prompt, and close its lease. Returns its cached tokens."""
    with cache.lease(MODEL, tokens) as lease:
        cached_tokens = compute(lease)
    cache.check()
    return cached_tokens


def test_prompts_that_recur_whole_are_all_cached_since_only_their_last_parts_are_kept() -> None:
    cache, pool = cache_of(60)
    prompts = [
        random_prompt(seed, 100) for seed in range(6)
    ]  # 25 blocks each: with a part for every block, two of them fit
    for _ in range(10):
        cached_tokens = [serve(cache, prompt) for prompt in prompts]
    assert cached_tokens == [99] * 6
    assert pool.num_withheld_blocks == PartMemory(5, 1, NUM_DEDICATED_PARTS).num_blocks(pool.num_parts - pool.num_free)


def test_beginnings_of_prompts_that_end_anywhere_are_reused_thanks_to_windows_in_between() -> None:
    cache, _ = cache_of(60)
    dice, num_cached_tokens, num_tokens = np.random.default_rng(1), 0, 0
    for _ in range(300):
        prompt = random_prompt(int(dice.integers(2)), 100)[: TOKEN_BYTES * int(dice.integers(20, 101))]
        num_cached_tokens += serve(cache, prompt)
        num_tokens += len(prompt) // TOKEN_BYTES
    assert num_cached_tokens / num_tokens > 0.9


def test_a_prompt_fits_alone_whatever_is_cached() -> None:
    cache, _ = cache_of(60)
    for seed in range(5):
        serve(cache, random_prompt(seed, 100))
    with cache.lease(MODEL, random_prompt(9, BLOCK_SIZE * cache.pool.num_blocks)) as lease:
        compute(lease)
        cache.check()
    with pytest.raises(OutOfBlocks):
        cache.lease(MODEL, random_prompt(9, BLOCK_SIZE * cache.pool.num_blocks + 1))


def test_a_public_prefix_makes_room_for_its_parts() -> None:
    cache, pool = cache_of(60)
    prefix = cache.public.register("system", "model", "", random_prompt(8, 24))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        compute(lease)
    for seed in range(5):
        serve(cache, random_prompt(seed, 100))
    if cache.match(prefix.namespace, prefix.tokens).cached_tokens < 23:
        with cache.lease(prefix.namespace, prefix.tokens) as lease:
            compute(lease)
    cache.public.activate(prefix)
    cache.check()
    assert pool.num_lasting == 6
    assert serve(cache, prefix.tokens + random_prompt(7, 8)) == 24


def test_a_tenant_at_its_ceiling_exceeds_its_quota_whatever_memory_parts_have() -> None:
    cache, _ = cache_of(60)
    for seed in range(6):
        serve(cache, random_prompt(seed, 100))
    ceiling = cache.pool.num_free + cache.num_evictable_blocks  # without the memory of parts, which could be evicted
    assert cache.windows.num_returnable_blocks > 1
    cache.tenants["acme"].quota = Quota(ceiling_blocks=ceiling)
    with pytest.raises(QuotaExceeded):
        cache.lease(Namespace("model", "acme"), random_prompt(9, (ceiling + 1) * BLOCK_SIZE))


def test_missed_parts_raise_the_bound_of_passed_parts_up_to_a_maximum() -> None:
    share = PartShare(num_blocks=100, block_size=4, memory=PartMemory(5, 1, 10))
    first_max_parts = share.max_parts
    share.record_missed_parts(10, num_passed_parts=5)
    assert share.max_parts > first_max_parts
    share.record_missed_parts(10_000, num_passed_parts=5)
    # 100 blocks of one byte and 10 parts of five bytes have 150 bytes. If every block had a part, parts would have five
    # sixths of them: 125 bytes, or 25 parts.
    assert share.max_parts == 25


@pytest.mark.parametrize(("num_parts", "num_blocks"), [(0, 0), (10, 0), (11, 3), (12, 5), (13, 8)])
def test_only_parts_without_memory_of_their_own_take_the_memory_of_blocks(num_parts: int, num_blocks: int) -> None:
    assert PartMemory(part_bytes=5, block_bytes=2, num_dedicated_parts=10).num_blocks(num_parts) == num_blocks
    assert PartMemory(part_bytes=5, block_bytes=0, num_dedicated_parts=10).num_blocks(num_parts) == 0
