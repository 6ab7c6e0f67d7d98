"""Recorded uses cover all blocks of the used prompts that the trees still have, whatever happens to their nodes."""

from __future__ import annotations

import random

import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys, PromptKeys
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.tier_index import SharedTierIndex
from tests.fake_runner import tokens
from tests.fakes import FakeClock

BLOCK_SIZE = 4
NAMESPACE = Namespace("model")
key_blocks = PromptKeys(
    BlockKeys(BlockFormat("model", "float32", "fp32", "x", BLOCK_SIZE, 64, "cpu")), InvocationMarks()
).blocks


def index_and_cache(num_blocks: int = 64) -> tuple[OffloadIndex, PrefixCache]:
    index = OffloadIndex([SharedTierIndex("redis", 2**18)], key_blocks, BLOCK_SIZE)
    return index, PrefixCache(num_blocks, BLOCK_SIZE, clock=FakeClock(), listeners=[index])


def publish(cache: PrefixCache, prompt: list[int]) -> None:
    with cache.lease(NAMESPACE, tokens(prompt)) as lease:
        lease.commit(len(prompt))


def keys_of(prompt: list[int]) -> list[bytes]:
    return [block.key for block in key_blocks(NAMESPACE, tokens(prompt))]


def test_each_used_block_is_taken_once_and_after_the_blocks_that_follow_it() -> None:
    index, cache = index_and_cache()
    prompts = [[*range(16), *range(start, start + 8)] for start in (100, 200, 300)]
    for prompt in prompts:
        publish(cache, prompt)
    keys = index.used_nodes.take(1000)
    assert sorted(keys) == sorted({key for prompt in prompts for key in keys_of(prompt)})
    assert keys[-4:] == keys_of(prompts[0])[3::-1], "the blocks of the shared prefix, the first one last"
    assert index.used_nodes.take(1000) == []


def test_a_bounded_take_begins_with_the_oldest_uses() -> None:
    index, cache = index_and_cache()
    first, second = list(range(100, 116)), list(range(200, 216))
    publish(cache, first)
    publish(cache, second)
    assert index.used_nodes.take(1) == keys_of(first)[::-1]
    assert index.used_nodes.take(1) == keys_of(second)[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_uses_refer_to_nodes_in_the_trees_and_cover_all_their_blocks(seed: int) -> None:
    rng = random.Random(seed)
    index, cache = index_and_cache(24)
    used: set[bytes] = set()
    for _ in range(200):
        choice = rng.random()
        if choice < 0.7:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            publish(cache, prompt)
            used.update(keys_of(prompt))
        elif choice < 0.85:
            cache.evict(rng.randrange(1, 6))
        elif choice < 0.9:
            cache.purge()
        else:
            keys = index.used_nodes.take(rng.choice([1, 8, 1000]))
            assert len(set(keys)) == len(keys)
            assert used.issuperset(keys)
        nodes = set(cache.nodes())
        assert index.used_nodes.taken <= nodes
        assert set(index.used_nodes._end_bytes) <= nodes
    on_device = {key for node in cache.nodes() for key in node.keys or ()}
    index.used_nodes.take(1000)
    last_used: set[bytes] = set()
    for prompt in ([0] * 24, [1] * 24):
        publish(cache, prompt)
        last_used.update(keys_of(prompt))
    assert set(index.used_nodes.take(1000)) >= last_used & on_device
