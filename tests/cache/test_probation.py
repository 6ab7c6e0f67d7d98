"""Lookups that end the probation of blocks, and lookups that do not. Blocks have four tokens."""

from __future__ import annotations

from radixkv.api.retention import Retention
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from tests.core_bench import Bench
from tests.fakes import MODEL, cached, publish, spell


def make_cache(num_blocks: int = 8) -> PrefixCache:
    return PrefixCache(num_blocks, 4, probation_share=0.5)


def checked_probation_blocks(cache: PrefixCache) -> int:
    """Count the blocks on probation, after a check of the cache."""
    cache.check()
    return cache.num_probation_blocks


def only_leaf(cache: PrefixCache) -> Node:
    (node,) = (node for node in cache.nodes() if node.is_leaf)
    return node


def test_blocks_that_a_second_request_finds_leave_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    assert checked_probation_blocks(cache) == 2
    publish(cache, "aaaabbbb")
    assert checked_probation_blocks(cache) == 0


def test_a_prompt_that_shares_less_than_a_block_ends_no_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    publish(cache, "aaacbbbb")
    assert checked_probation_blocks(cache) == 4


def test_a_leaf_of_which_a_part_is_found_leaves_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbbcccc")
    cache.lease(MODEL, spell("aaaabbbbdddd")).close()  # it publishes nothing, so nothing is split
    assert (checked_probation_blocks(cache), only_leaf(cache).num_reused_blocks) == (0, 2)


def test_later_chunks_of_a_prompt_do_not_end_its_probation() -> None:
    cache = make_cache()
    with cache.lease(MODEL, spell("aaaabbbbcccc")) as lease:
        for end in (4, 8, 12):
            lease.commit(end)
    assert checked_probation_blocks(cache) == 3


def test_a_resumed_request_does_not_end_its_own_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    cache.lease(MODEL, spell("aaaabbbb"), is_resumed=True).close()
    assert checked_probation_blocks(cache) == 2


def test_a_resumed_request_does_not_count_as_the_return_of_an_evicted_prompt() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    cache.evict(2)
    with cache.lease(MODEL, spell("aaaabbbb"), is_resumed=True) as lease:
        lease.commit(8)
    assert checked_probation_blocks(cache) == 2


def test_a_preempted_request_stays_on_probation() -> None:
    bench = Bench(num_blocks=9, probation_share=0.5)
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16)
    bench.run()
    assert bench.core.stats.load().requests.pauses > 0
    assert {node.num_reused_blocks for node in bench.cache.nodes()} == {0}


def test_after_a_split_only_shared_blocks_are_off_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaa")
    publish(cache, "aaaabbbb")
    assert checked_probation_blocks(cache) == 0  # the leaf was found before it grew
    publish(cache, "aaaacccc")
    assert checked_probation_blocks(cache) == 2


def test_a_request_that_does_not_read_the_cache_ends_the_probation_of_the_blocks_that_it_shares() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    with cache.lease(MODEL, spell("aaaacccc"), read=False) as lease:
        lease.commit(8)
    assert checked_probation_blocks(cache) == 2
    cache.evict(2)
    assert (checked_probation_blocks(cache), cached(cache, "aaaa")) == (0, 4)


def test_a_cut_divides_the_reused_blocks() -> None:
    cache = make_cache()
    publish(cache, "aaaa")
    publish(cache, "aaaabbbb")
    cache.retain(MODEL, spell("aaaabbbb"), Retention(60, end=4))
    assert checked_probation_blocks(cache) == 1
    assert [node.num_reused_blocks for node in cache.nodes()] == [1, 0]


def test_every_node_of_a_path_that_is_found_is_off_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    cache.retain(MODEL, spell("aaaabbbb"), Retention(60, end=4))
    publish(cache, "aaaabbbb")
    assert (checked_probation_blocks(cache), [node.num_reused_blocks for node in cache.nodes()]) == (0, [1, 1])


def test_a_join_adds_up_the_reused_blocks() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    publish(cache, "aaaabbbb")
    cache.retain(MODEL, spell("aaaabbbb"), Retention(60, end=4))
    cache.retain(MODEL, spell("aaaabbbb"), Retention(50, end=4))
    publish(cache, "aaaabbbb")
    assert (checked_probation_blocks(cache), only_leaf(cache).num_blocks, only_leaf(cache).num_reused_blocks) == (
        0,
        2,
        2,
    )


def test_a_leaf_that_is_shortened_has_no_more_reused_blocks_than_blocks() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbb")
    publish(cache, "aaaabbbb")
    cache.evict(1)
    assert only_leaf(cache).num_reused_blocks == 1
    publish(cache, "aaaacccc")  # the leaf grows by a block that no request has found
    cache.retain(MODEL, spell("aaaacccc"), Retention(60, end=4))
    assert checked_probation_blocks(cache) == 1


def test_a_prompt_that_returns_soon_after_its_eviction_is_not_on_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaa")
    cache.evict(1)
    publish(cache, "aaaa")
    publish(cache, "bbbb")
    assert checked_probation_blocks(cache) == 1


def test_a_prompt_that_returns_after_as_many_evictions_as_the_pool_has_blocks_is_on_probation() -> None:
    for num_later_evictions, is_on_probation in ((7, False), (8, True)):
        cache = make_cache()
        publish(cache, "aaaa")
        cache.evict(1)
        for index in range(num_later_evictions):
            publish(cache, chr(500 + index) * 4)
            cache.evict(1)
        publish(cache, "aaaa")
        assert (checked_probation_blocks(cache) == 1) is is_on_probation
        assert len(cache._queue._evicted) <= 8


def test_without_a_bound_of_probation_no_eviction_is_remembered() -> None:
    cache = PrefixCache(8, 4)
    for text in ("aaaa", "aaaa", "bbbb"):
        publish(cache, text)
    cache.evict(2)
    assert (checked_probation_blocks(cache), cache._queue._evicted) == (0, {})


def test_shared_blocks_leave_probation() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbbcccc")
    cache.share(MODEL, spell("aaaab"))
    assert checked_probation_blocks(cache) == 1
    cache.share(MODEL, spell("aaaabbbbcccc"))
    assert checked_probation_blocks(cache) == 0
