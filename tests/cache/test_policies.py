"""Eviction orders of the classic policies, and the events that policies receive. Blocks have four tokens."""

import re
from pathlib import Path
from typing import Any

import pytest

import radixkv.cache.eviction_queue
import radixkv.cache.prefix_cache
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EVICTION_POLICIES
from tests.fakes import MODEL, FakeClock, cached, publish, spell


def make_cache(policy: str, num_blocks: int = 32) -> tuple[PrefixCache, FakeClock]:
    clock = FakeClock()
    return PrefixCache(num_blocks, 4, policy=make_policy(policy, num_blocks), clock=clock), clock


def survivors(policy: str, *texts: str, num_evicted_blocks: int) -> list[str]:
    """Publish texts a second apart, evict blocks, and return the texts that are still cached completely."""
    cache, clock = make_cache(policy)
    for text in texts:
        clock.now_s += 1
        publish(cache, text)
    cache.evict(num_evicted_blocks)
    cache.check()
    return [text for text in dict.fromkeys(texts) if cached(cache, text) == len(text)]


def test_every_name_of_the_configuration_makes_a_policy() -> None:
    for name in EVICTION_POLICIES:
        cache, clock = make_cache(name)
        for text in ("aaaabbbb", "aaaacccc", "dddd", "aaaacccceeee"):
            clock.now_s += 1
            publish(cache, text)
        assert cache.evict(100) == 5  # every key was comparable with every other
        cache.check()


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    assert survivors("lru", "aaaa", "aaaa", "bbbb", "cccc", num_evicted_blocks=2) == ["cccc"]


def test_slru_keeps_what_was_ever_used_again() -> None:
    assert survivors("slru", "aaaa", "aaaa", "bbbb", "cccc", num_evicted_blocks=2) == ["aaaa"]


def test_lfu_keeps_what_was_used_most() -> None:
    texts = ("aaaa", "aaaa", "aaaa", "bbbb", "bbbb", "cccc")
    assert survivors("lfu", *texts, num_evicted_blocks=2) == ["aaaa"]


def test_priority_wins_over_recency() -> None:
    cache, clock = make_cache("priority")
    for text in ("aaaa", "bbbb", "cccc"):
        clock.now_s += 1
        with cache.lease(MODEL, spell(text)) as lease:
            lease.commit(4)
            assert lease.node is not None
            lease.node.priority = {"aaaa": 80, "bbbb": 50, "cccc": 20}[text]
    cache.evict(2)
    assert [cached(cache, text) for text in ("aaaa", "bbbb", "cccc")] == [4, 0, 0]


def test_the_default_is_lru_until_it_has_learned() -> None:
    assert survivors("adaptive", "aaaa", "bbbb", "cccc", "aaaa", num_evicted_blocks=2) == ["aaaa"]


def test_a_use_counts_for_every_node_of_the_path() -> None:
    cache, _ = make_cache("lru")
    for text in ("aaaabbbb", "aaaacccc", "aaaaccccdddd"):
        publish(cache, text)
    num_uses = {node.tokens: node.num_uses for node in cache._trees[MODEL].nodes()}
    assert num_uses == {spell("aaaa"): 2, spell("bbbb"): 0, spell("ccccdddd"): 1}


def test_after_a_split_the_half_that_is_not_shared_is_as_old_as_before() -> None:
    cache, clock = make_cache("lru")
    for text in ("aaaabbbb", "cccc", "aaaadddd"):
        clock.now_s += 1
        publish(cache, text)
    cache.evict(1)
    assert [cached(cache, text) for text in ("aaaabbbb", "cccc", "aaaadddd")] == [4, 4, 8]


def test_a_policy_may_offer_a_leaf_block_by_block() -> None:
    class OneByOne(EvictionPolicy):
        def key(self, node: Any) -> float:
            return -node.num_blocks  # the longest first

        def num_offered_blocks(self, leaf: Any) -> int:
            return 1

    cache = PrefixCache(16, 4, policy=OneByOne(), clock=FakeClock())
    publish(cache, "aaaabbbbcccc")
    publish(cache, "dddd")
    assert (
        cache.evict(3) == 3
    )  # from the longest leaf until both have one block, and then from the leaf that has waited longer
    cache.check()
    assert [cached(cache, text) for text in ("aaaabbbbcccc", "dddd")] == [4, 0]


@pytest.mark.parametrize(
    "module", [radixkv.cache.eviction_queue, radixkv.cache.prefix_cache], ids=lambda module: module.__name__
)
def test_the_eviction_queue_and_the_cache_know_no_policy_by_name(module: Any) -> None:
    words = set(re.findall(r"\w+", Path(module.__file__).read_text(encoding="utf-8").lower()))
    # "priority" is also the word for what a retention sets.
    assert words.isdisjoint({*EVICTION_POLICIES, "optimal"} - {"priority"})
    assert "leastrecentlyused" not in words
