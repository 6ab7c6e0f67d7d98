"""Loads for a model with windowed layers: a hit ends where the blocks of its window have their parts."""

from __future__ import annotations

import gc

from radixkv.api.miss_reason import MissReason
from radixkv.api.result import PrefillResult
from radixkv.cache.window_pool import NO_PART
from radixkv.namespace import Namespace
from radixkv.offload.loader import Load
from radixkv.offload.tiers.block_store import PutOutcome
from tests.fake_runner import next_token, tokens

from .tiered_bench import TieredBench

NAMESPACE = Namespace("fake")
PROMPT = range(41)  # ten whole blocks and a token; a hit needs the parts of the last two blocks


def bench_of(num_blocks: int = 30, **stores: int) -> TieredBench:
    """Return a bench that has parts for eight blocks: those at the end of a long prompt, and one near its beginning."""
    return TieredBench(num_blocks, num_parts=8, **stores)


def cached_by_tier(result: PrefillResult) -> tuple[int, int]:
    """Return the numbers of cached tokens that came from the device, and from host memory."""
    return result.usage.device_tokens, result.usage.host_tokens


def have_parts(bench: TieredBench, ids: range) -> list[bool]:
    """Return whether each block of a prompt that is on the device has its part."""
    (pool,) = bench.cache.windows.pools
    return [pool.part_of(each) != NO_PART for each in bench.cache.found_blocks(NAMESPACE, tokens(ids))]


def test_a_prompt_is_loaded_although_blocks_before_its_window_have_no_parts() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    assert have_parts(bench, PROMPT) == [False, True, False, False] + [True] * 6  # and the last token's block has one
    bench.evict(11)
    assert len(bench.index.tiers["host"].partless) == 3
    result = bench.prefill(PROMPT)
    assert cached_by_tier(result) == (0, 40)
    assert result.next_token_id == next_token(tokens(PROMPT))
    assert len(bench.mover.written_parts) == 2
    assert have_parts(bench, PROMPT) == [False] * 8 + [True] * 2


def test_a_load_that_has_ended_is_freed_without_a_garbage_collection() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(11)
    gc.collect()
    loads_of_other_tests = {id(each) for each in gc.get_objects() if type(each) is Load}
    gc.disable()
    try:
        assert cached_by_tier(bench.prefill(PROMPT)) == (0, 40)
        loads = [each for each in gc.get_objects() if type(each) is Load and id(each) not in loads_of_other_tests]
        assert loads == []
    finally:
        gc.enable()


def test_a_prompt_that_ends_where_parts_are_gone_is_computed_and_nothing_is_loaded() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(11)
    result = bench.prefill(range(15))
    assert (cached_by_tier(result), result.miss_reason) == ((0, 0), MissReason.EVICTED)
    assert bench.offload.stats()[0].loaded_blocks == 0


def test_blocks_left_on_the_device_are_used_with_the_loaded_end() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(8)
    assert bench.cache.match(NAMESPACE, tokens(PROMPT)).cached_tokens == 0
    before = bench.cache.found_blocks(NAMESPACE, tokens(PROMPT)).tolist()
    assert bench.core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 40
    assert cached_by_tier(bench.prefill(PROMPT)) == (12, 28)
    assert bench.cache.found_blocks(NAMESPACE, tokens(PROMPT)).tolist()[:3] == before


def test_blocks_left_without_parts_are_not_reused_if_the_store_has_lost_the_end() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(8)
    (store,) = bench.stores.values()
    store.memory.delete(list(bench.index.tiers["host"]))
    result = bench.prefill(PROMPT)
    assert cached_by_tier(result) == (0, 0)
    assert result.next_token_id == next_token(tokens(PROMPT))


def test_other_blocks_are_evicted_for_a_prompt_whose_end_is_loaded() -> None:
    bench = bench_of(num_blocks=24)
    bench.prefill(PROMPT)
    bench.clock.now_s += 1
    bench.prefill(range(100, 184))  # 21 blocks of 24
    assert bench.cache.found_blocks(NAMESPACE, tokens(PROMPT)).size == 3
    assert cached_by_tier(bench.prefill(PROMPT)) == (12, 28)


def test_a_request_that_may_not_write_reuses_no_blocks_without_parts() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(8)
    assert cached_by_tier(bench.prefill(PROMPT, write_cache=False)) == (0, 0)


def test_parts_are_loaded_for_blocks_that_the_device_has_without_them() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(11)
    bench.prefill(PROMPT)
    shorter = range(26)
    assert have_parts(bench, shorter) == [False] * 6
    assert cached_by_tier(bench.prefill(shorter)) == (12, 12)
    assert have_parts(bench, shorter)[-2:] == [True, True]


def test_the_index_learns_from_a_load_that_a_block_has_no_part() -> None:
    bench = bench_of()
    bench.prefill(PROMPT)
    bench.evict(11)
    tier_index = bench.index.tiers["host"]
    partless_keys, tier_index.partless = tier_index.partless, set()  # as after a restart
    assert cached_by_tier(bench.prefill(range(17))) == (0, 0)
    assert tier_index.partless == partless_keys
    bench.evict(30)
    assert tier_index.partless == set(), "they were computed again, and evicted with their parts"
    assert bench.offload.tiers["host"].counts().saved[PutOutcome.STORED] == 10 + 3
    assert cached_by_tier(bench.prefill(range(13))) == (0, 12)
