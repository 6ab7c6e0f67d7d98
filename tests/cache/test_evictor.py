"""Eviction order of leaves, and how much of each is evicted. Blocks are four tokens; only tests move the clock."""

from __future__ import annotations

import pytest

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import FakeClock, cached, lease_text, publish


class Timeline:
    """A cache whose clock moves by a second with every prompt."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.clock = FakeClock()
        self.cache = PrefixCache(num_blocks, 4, clock=self.clock)

    def publish(self, *texts: str) -> None:
        for text in texts:
            self.clock.now_s += 1
            publish(self.cache, text)

    def evict(self, num_blocks: int) -> int:
        freed = self.cache.evict(num_blocks)
        self.cache.check()
        return freed

    def left(self, *texts: str) -> list[int]:
        return [cached(self.cache, text) for text in texts]


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    line = Timeline()
    line.publish("aaaa", "bbbb", "cccc")
    line.publish("aaaa")
    assert line.evict(1) == 1
    assert line.left("aaaa", "bbbb", "cccc") == [4, 0, 4]
    assert line.evict(1) == 1
    assert line.left("aaaa", "bbbb", "cccc") == [4, 0, 0]


def test_a_leaf_is_as_recent_as_the_end_of_its_last_lease() -> None:
    line = Timeline()
    line.publish("aaaa")
    lease = lease_text(line.cache, "aaaaX")
    line.publish("bbbb")
    line.clock.now_s += 1
    lease.close()
    line.evict(1)
    assert line.left("aaaa", "bbbb") == [4, 0]


def test_a_path_is_used_when_a_lease_begins_and_when_it_ends() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc")
    line.clock.now_s = 10
    lease = lease_text(line.cache, "aaaabbbbX")
    node = lease.node
    assert node is not None
    assert node.parent is not None
    assert (node.last_used_s, node.parent.last_used_s) == (10, 10)
    line.clock.now_s = 20
    lease.close()
    assert (node.last_used_s, node.parent.last_used_s) == (20, 20)


def test_leaves_used_at_the_same_time_are_evicted_in_the_order_in_which_they_became_unused() -> None:
    line = Timeline()
    for text in ("aaaa", "bbbb", "cccc"):
        publish(line.cache, text)
    line.evict(2)
    assert line.left("aaaa", "bbbb", "cccc") == [0, 0, 4]


def test_leaves_are_evicted_before_their_parents() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc", "dddd")
    assert line.evict(2) == 2
    assert line.left("aaaabbbb", "aaaacccc", "dddd") == [4, 4, 4]
    assert line.evict(1) == 1
    assert line.left("aaaa", "dddd") == [0, 4]


def test_a_parent_is_as_recent_as_its_latest_child() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc", "dddd")
    line.publish("aaaacccc")
    assert line.evict(2) == 2
    assert line.left("aaaacccc", "aaaabbbb", "dddd") == [8, 4, 0]


def test_a_leaf_is_evicted_from_its_end_and_no_more_than_requested() -> None:
    line = Timeline()
    line.publish("aaaabbbbccccdd")
    assert line.evict(1) == 1
    assert line.left("aaaabbbbccccdd") == [12]
    assert line.evict(2) == 2
    assert line.left("aaaabbbbccccdd") == [4]
    assert len(line.cache.segments) == 1


def test_a_truncated_leaf_keeps_its_place() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "cccc")
    line.evict(1)
    line.evict(1)
    assert line.left("aaaabbbb", "cccc") == [0, 4]


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 4, 5, 6, 7, 100])
def test_eviction_frees_the_requested_blocks_or_all_evictable_ones(num_blocks: int) -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc", "ddddeeee", "ffff")
    assert line.cache.num_evictable_blocks == 6
    num_free = line.cache.pool.num_free
    freed = line.evict(num_blocks)
    assert freed == min(num_blocks, 6)
    assert line.cache.pool.num_free == num_free + freed
    assert line.cache.num_evicted_blocks == freed
    assert line.cache.num_evictable_blocks == 6 - freed


def test_a_negative_number_of_blocks_evicts_nothing() -> None:
    line = Timeline()
    line.publish("aaaa")
    assert line.evict(-1) == 0
    assert line.left("aaaa") == [4]


def test_a_pinned_path_stays_and_its_idle_siblings_are_evicted() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc")
    with lease_text(line.cache, "aaaabbbbX"):
        assert line.evict(100) == 1
        assert line.left("aaaabbbb", "aaaacccc") == [8, 4]
    assert line.evict(100) == 2


def test_a_long_path_whose_namespace_was_purged_releases_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Timeline()
    line.publish("aaaabbbbccccdddd", "aaaaZZZZ", "aaaabbbbZZZZ", "aaaabbbbccccZZZZ")
    monkeypatch.setattr("radixkv.cache.evictor.MAX_PATH_NODES", 2)
    running, held = (lease_text(line.cache, "aaaabbbbccccddddZ") for _ in range(2))
    held.hold()
    line.cache.purge()
    line.cache.check()
    running.close()
    held.close()
    line.cache.check()
    assert line.cache.pool.num_free == line.cache.pool.num_blocks


def test_a_pinned_parent_is_evicted_after_its_children_when_its_lease_is_closed() -> None:
    line = Timeline()
    line.publish("aaaabbbb", "aaaacccc")
    lease = lease_text(line.cache, "aaaaX")
    assert line.evict(100) == 2
    assert line.left("aaaa") == [4]
    lease.close()
    line.cache.check()
    assert line.evict(100) == 1
    assert line.left("aaaa") == [0]


def test_a_leaf_that_grew_is_recent() -> None:
    line = Timeline()
    line.publish("aaaa", "bbbb", "aaaaXX")
    line.evict(1)
    assert line.left("aaaa", "bbbb") == [4, 0]


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
