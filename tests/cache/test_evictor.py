"""Eviction order of leaves, and how much of each is evicted. Blocks are four tokens; only tests move the clock."""

from __future__ import annotations

import pytest

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import FakeClock, cached, lease_text, publish


class Timeline:
    """A cache whose clock moves by a second with every prompt that `publish` publishes."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.clock = FakeClock()
        self.cache = PrefixCache(num_blocks, 4, clock=self.clock)

    def publish(self, *texts: str) -> None:
        for text in texts:
            self.clock.now_s += 1
            publish(self.cache, text)

    def evict(self, num_blocks: int) -> int:
        num_freed_blocks = self.cache.evict(num_blocks)
        self.cache.check()
        return num_freed_blocks

    def cached_tokens(self, *texts: str) -> list[int]:
        return [cached(self.cache, text) for text in texts]


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    timeline = Timeline()
    timeline.publish("aaaa", "bbbb", "cccc")
    timeline.publish("aaaa")
    assert timeline.evict(1) == 1
    assert timeline.cached_tokens("aaaa", "bbbb", "cccc") == [4, 0, 4]
    assert timeline.evict(1) == 1
    assert timeline.cached_tokens("aaaa", "bbbb", "cccc") == [4, 0, 0]


def test_a_leaf_is_as_recent_as_the_end_of_its_last_lease() -> None:
    timeline = Timeline()
    timeline.publish("aaaa")
    lease = lease_text(timeline.cache, "aaaaX")
    timeline.publish("bbbb")
    timeline.clock.now_s += 1
    lease.close()
    timeline.evict(1)
    assert timeline.cached_tokens("aaaa", "bbbb") == [4, 0]


def test_a_path_is_used_when_a_lease_begins_and_when_it_ends() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc")
    timeline.clock.now_s = 10
    lease = lease_text(timeline.cache, "aaaabbbbX")
    node = lease.node
    assert node is not None
    assert node.parent is not None
    assert (node.last_used_s, node.parent.last_used_s) == (10, 10)
    timeline.clock.now_s = 20
    lease.close()
    assert (node.last_used_s, node.parent.last_used_s) == (20, 20)


def test_leaves_used_at_the_same_time_are_evicted_in_the_order_in_which_they_became_unused() -> None:
    timeline = Timeline()
    for text in ("aaaa", "bbbb", "cccc"):
        publish(timeline.cache, text)
    timeline.evict(2)
    assert timeline.cached_tokens("aaaa", "bbbb", "cccc") == [0, 0, 4]


def test_leaves_are_evicted_before_their_parents() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc", "dddd")
    assert timeline.evict(2) == 2
    assert timeline.cached_tokens("aaaabbbb", "aaaacccc", "dddd") == [4, 4, 4]
    assert timeline.evict(1) == 1
    assert timeline.cached_tokens("aaaa", "dddd") == [0, 4]


def test_a_parent_is_as_recent_as_its_latest_child() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc", "dddd")
    timeline.publish("aaaacccc")
    assert timeline.evict(2) == 2
    assert timeline.cached_tokens("aaaacccc", "aaaabbbb", "dddd") == [8, 4, 0]


def test_a_leaf_is_evicted_from_its_end_and_no_more_than_requested() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbbccccdd")
    assert timeline.evict(1) == 1
    assert timeline.cached_tokens("aaaabbbbccccdd") == [12]
    assert timeline.evict(2) == 2
    assert timeline.cached_tokens("aaaabbbbccccdd") == [4]
    assert len(timeline.cache.segments) == 1


def test_a_truncated_leaf_keeps_its_place() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "cccc")
    timeline.evict(1)
    timeline.evict(1)
    assert timeline.cached_tokens("aaaabbbb", "cccc") == [0, 4]


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 4, 5, 6, 7, 100])
def test_eviction_frees_the_requested_blocks_or_all_evictable_ones(num_blocks: int) -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc", "ddddeeee", "ffff")
    assert timeline.cache.num_evictable_blocks == 6, "the first two prompts share a block"
    num_free = timeline.cache.pool.num_free
    num_freed_blocks = timeline.evict(num_blocks)
    assert num_freed_blocks == min(num_blocks, 6)
    assert timeline.cache.pool.num_free == num_free + num_freed_blocks
    assert timeline.cache.num_evicted_blocks == num_freed_blocks
    assert timeline.cache.num_evictable_blocks == 6 - num_freed_blocks


def test_a_negative_number_of_blocks_evicts_nothing() -> None:
    timeline = Timeline()
    timeline.publish("aaaa")
    assert timeline.evict(-1) == 0
    assert timeline.cached_tokens("aaaa") == [4]


def test_a_pinned_path_stays_and_its_idle_siblings_are_evicted() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc")
    with lease_text(timeline.cache, "aaaabbbbX"):
        assert timeline.evict(100) == 1
        assert timeline.cached_tokens("aaaabbbb", "aaaacccc") == [8, 4]
    assert timeline.evict(100) == 2


def test_a_long_path_whose_namespace_was_purged_releases_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbbccccdddd", "aaaaZZZZ", "aaaabbbbZZZZ", "aaaabbbbccccZZZZ")
    monkeypatch.setattr("radixkv.cache.evictor.MAX_PATH_NODES", 2)
    running, held = (lease_text(timeline.cache, "aaaabbbbccccddddZ") for _ in range(2))
    held.hold()
    timeline.cache.purge()
    timeline.cache.check()
    running.close()
    held.close()
    timeline.cache.check()
    assert timeline.cache.pool.num_free == timeline.cache.pool.num_blocks


def test_a_pinned_parent_is_evicted_after_its_children_when_its_lease_is_closed() -> None:
    timeline = Timeline()
    timeline.publish("aaaabbbb", "aaaacccc")
    lease = lease_text(timeline.cache, "aaaaX")
    assert timeline.evict(100) == 2
    assert timeline.cached_tokens("aaaa") == [4]
    lease.close()
    timeline.cache.check()
    assert timeline.evict(100) == 1
    assert timeline.cached_tokens("aaaa") == [0]


def test_a_leaf_that_grew_is_recent() -> None:
    timeline = Timeline()
    timeline.publish("aaaa", "bbbb", "aaaaXX")
    timeline.evict(1)
    assert timeline.cached_tokens("aaaa", "bbbb") == [4, 0]


def test_a_policy_is_a_sort_key() -> None:
    class LongestFirst(EvictionPolicy):
        def key(self, node: Node) -> int:
            return -node.num_blocks

    cache = PrefixCache(16, 4, policy=LongestFirst(), clock=FakeClock())
    for text in ("aaaa", "bbbbccccdddd", "eeeeffff"):
        publish(cache, text)
    cache.evict(3)
    cache.check()
    assert [cached(cache, text) for text in ("aaaa", "bbbbccccdddd", "eeeeffff")] == [4, 0, 8]
