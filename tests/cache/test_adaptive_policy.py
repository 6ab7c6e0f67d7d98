"""The default policy, which learns from leaves that are used again. Blocks have four tokens."""

from types import SimpleNamespace
from typing import Any

from radixkv.api.retention import Retention
from radixkv.cache.adaptive_policy import AdaptivePolicy, BlockSampler, LeafOrder, OrderTrial, ShadowCache
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, publish, spell


def test_a_shadow_cache_lets_the_smallest_key_go() -> None:
    shadow = ShadowCache()
    for digest, key, was_held in ((1, 5.0, False), (2, 3.0, False), (3, 4.0, False), (1, 2.0, True)):
        assert shadow.use([digest], key, key, 3) == [was_held]
    assert shadow.use([4, 3], 9.0, 4.0, 3) == [False, True]  # the newest key of a block counts
    assert [digest in shadow for digest in (1, 2, 3, 4)] == [False, True, True, True]
    for index in range(1000):
        shadow.use([index % 5], float(index), float(index), 3)
    assert len(shadow) == 3
    assert len(shadow._heap) <= 13


def test_the_same_prefixes_are_sampled_wherever_nodes_begin() -> None:
    def samples(*texts: str) -> list[tuple[int, int]]:
        """Depth in blocks and digest."""
        cache = PrefixCache(1000, 4, clock=FakeClock())
        for text in texts:
            publish(cache, text)
        sampler = BlockSampler(1000)
        found = []
        for node in cache._trees[MODEL].nodes():
            depth, above = 0, node.parent
            while above is not None:
                depth, above = depth + above.num_blocks, above.parent
            found += [(depth + index, digest) for index, digest in sampler.sample(node, 0)]
        return sorted(found)

    text = "".join(chr(97 + index % 26) * 4 for index in range(500))
    whole = samples(text)
    assert [depth for depth, _ in whole] == [127, 255, 383]  # every 512 tokens of four a block
    assert samples(text, text[:800] + "?" * 40) == whole


def test_an_order_in_force_gives_way_to_a_clearly_better_one_only() -> None:
    trial = OrderTrial(100)
    trial.count_inserted(400)
    trial._wins[LeafOrder.REUSED_LAST][LeafOrder.LIFETIMES] = 60.0
    trial._wins[LeafOrder.LIFETIMES][LeafOrder.REUSED_LAST] = 40.0  # a lead of 20: two deviations of a coin
    assert not trial.count_inserted(10)
    assert trial.order == LeafOrder.LIFETIMES
    trial._wins[LeafOrder.REUSED_LAST][LeafOrder.LIFETIMES] += 10
    assert not trial.count_inserted(9)  # a tenth of the cache is not yet new
    assert trial.count_inserted(1)
    assert trial.order == LeafOrder.REUSED_LAST


def test_lifetimes_are_given_time_to_be_learned() -> None:
    trial = OrderTrial(100)
    trial.count_inserted(380)
    trial._wins[LeafOrder.LAST_USE][LeafOrder.LIFETIMES] = 1000.0
    assert not trial.count_inserted(10)
    assert trial.order == LeafOrder.LIFETIMES
    assert trial.count_inserted(20)
    assert trial.order == LeafOrder.LAST_USE


def make_cache(policy: str, num_blocks: int = 32) -> tuple[PrefixCache, FakeClock]:
    clock = FakeClock()
    return PrefixCache(num_blocks, 4, policy=make_policy(policy, num_blocks), clock=clock), clock


def make_adaptive_cache(num_blocks: int = 32) -> tuple[PrefixCache, FakeClock, AdaptivePolicy]:
    clock, policy = FakeClock(), AdaptivePolicy(num_blocks)
    return PrefixCache(num_blocks, 4, policy=policy, clock=clock), clock, policy


def leaf_used(num_uses: int, age_s: float, fingerprint: int = 0) -> Any:
    stay = SimpleNamespace(kind=num_uses)
    return SimpleNamespace(num_uses=num_uses, last_used_s=age_s, fingerprint=fingerprint, policy_note=stay)


def test_a_lifetime_is_added_to_the_last_use_and_a_share_of_nodes_gets_the_long_one() -> None:
    policy = AdaptivePolicy(100)
    policy._lifetimes_s = [(0.0, 8.0), (64.0, 64.0)]
    policy._long_share = 0.5
    assert policy.key(leaf_used(0, 10.0, fingerprint=2**62)) == 18
    assert policy.key(leaf_used(0, 10.0, fingerprint=2**63)) == 10
    assert policy.key(leaf_used(1, 10.0)) == 74


def test_what_it_remembers_is_bounded() -> None:
    cache, clock, policy = make_adaptive_cache(8)
    for index in range(5000):
        clock.now_s += 1
        publish(cache, chr(1000 + index) * 4)
    assert len(policy._ghosts) == 4096


def test_a_leaf_that_returns_after_its_eviction_is_learned_from() -> None:
    cache, clock, policy = make_adaptive_cache(4)
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
        cache, clock, policy = make_adaptive_cache()
        publish(cache, "aaaabbbbccccdddd")
        if cuts:
            for start in (8, 4, 12):
                cache.retain(MODEL, spell("aaaabbbbccccdddd"), Retention(20, start=start))
            assert len(cache.segments) == 4
        clock.now_s = 7
        publish(cache, "aaaabbbbccccddddeeee")
        return policy._counts.hits.sum(), policy._counts.waits.sum()

    assert learned(cuts=True) == learned(cuts=False) == (4, 28)


def test_a_leaf_that_returns_in_chunks_is_learned_from_as_if_at_once() -> None:
    def learned(*ends: int) -> float:
        cache, clock, policy = make_adaptive_cache(8)
        publish(cache, "aaaabbbbccccdddd")
        cache.evict(4)
        clock.now_s = 60
        with cache.lease(MODEL, spell("aaaabbbbccccddddeeee")) as lease:
            for end in ends:
                lease.commit(end)
        return float(policy._counts.hits.sum())

    assert learned(20) == learned(4, 8, 12, 16, 20) == 4
