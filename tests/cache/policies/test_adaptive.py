"""The default policy learns from leaves that come back, and keys them by it. Blocks are four tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from radixkv.api.retention import Retention
from radixkv.cache.policies.adaptive import BestOfThreeOrders
from radixkv.cache.policies.by_name import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, publish, spell


def make_cache(policy: str, num_blocks: int = 32) -> tuple[PrefixCache, FakeClock]:
    clock = FakeClock()
    return PrefixCache(num_blocks, 4, policy=make_policy(policy, num_blocks), clock=clock), clock


def leaf_used(num_uses: int, age_s: float, fingerprint: int = 0) -> Any:
    stay = SimpleNamespace(kind=num_uses)
    return SimpleNamespace(num_uses=num_uses, last_used_s=age_s, fingerprint=fingerprint, policy_note=stay)


def test_a_lifetime_is_added_to_the_last_use_and_a_share_of_nodes_gets_the_long_one() -> None:
    policy = BestOfThreeOrders(100)
    policy._lifetimes_s = [(0.0, 8.0), (64.0, 64.0)]
    policy._long_share = 0.5
    assert policy.key(leaf_used(0, 10.0, fingerprint=2**62)) == 18
    assert policy.key(leaf_used(0, 10.0, fingerprint=2**63)) == 10
    assert policy.key(leaf_used(1, 10.0)) == 74


def test_what_it_remembers_is_bounded() -> None:
    cache, clock = make_cache("adaptive", num_blocks=8)
    policy = cache._holdings.policy
    assert isinstance(policy, BestOfThreeOrders)
    for index in range(5000):
        clock.now_s += 1
        publish(cache, chr(1000 + index) * 4)
    assert len(policy._ghosts) == 4096


def test_a_leaf_that_comes_back_after_eviction_is_learned_from() -> None:
    cache, clock = make_cache("adaptive", num_blocks=4)
    policy = cache._holdings.policy
    assert isinstance(policy, BestOfThreeOrders)
    publish(cache, "aaaabbbb")
    cache.evict(1)  # the leaf is shortened before it goes: both parts are remembered
    cache.evict(1)
    clock.now_s = 60
    publish(cache, "aaaabbbbcccc")
    assert policy._counts.hits.sum() == 2
    assert policy._counts.waits.sum() == 120
    assert [node.policy_note.num_uses for node in cache._trees[MODEL].nodes()] == [1]


def test_what_is_learned_does_not_depend_on_where_a_path_is_cut() -> None:
    def learned(*, cuts: bool) -> tuple[float, float]:
        cache, clock = make_cache("adaptive")
        policy = cache._holdings.policy
        assert isinstance(policy, BestOfThreeOrders)
        publish(cache, "aaaabbbbccccdddd")
        if cuts:
            for start in (8, 4, 12):
                cache.retain(MODEL, spell("aaaabbbbccccdddd"), Retention(20, start=start))
            assert len(cache.segments) == 4
        clock.now_s = 7
        publish(cache, "aaaabbbbccccddddeeee")
        return policy._counts.hits.sum(), policy._counts.waits.sum()

    assert learned(cuts=True) == learned(cuts=False) == (4, 28)


def test_a_leaf_that_comes_back_in_chunks_is_learned_from_as_if_at_once() -> None:
    def learned(*ends: int) -> float:
        cache, clock = make_cache("adaptive", num_blocks=8)
        policy = cache._holdings.policy
        assert isinstance(policy, BestOfThreeOrders)
        publish(cache, "aaaabbbbccccdddd")
        cache.evict(4)
        clock.now_s = 60
        with cache.lease(MODEL, spell("aaaabbbbccccddddeeee")) as lease:
            for end in ends:
                lease.commit(end)
        return float(policy._counts.hits.sum())

    assert learned(20) == learned(4, 8, 12, 16, 20) == 4
