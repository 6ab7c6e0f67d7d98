"""The eviction order of leaves on probation and other leaves. Blocks have four tokens."""

from __future__ import annotations

import random

import pytest

from radixkv.api.retention import Retention
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.config import EVICTION_POLICIES
from radixkv.namespace import Namespace
from radixkv.planning.simulate import simulate
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest
from tests.fakes import MODEL, FakeClock, cached, publish, spell

ONE_SHOTS = tuple(4 * chr(500 + index) for index in range(40))
NEVER_EXCEEDED = 1 - 1e-9  # a share that bounds probation, but that leaves on probation never exceed


def make_cache(share: float, policy: str = "lru", num_blocks: int = 8) -> tuple[PrefixCache, FakeClock]:
    clock = FakeClock()
    eviction_policy = make_policy(policy, num_blocks)
    return PrefixCache(num_blocks, 4, policy=eviction_policy, probation_share=share, clock=clock), clock


def publish_all(cache: PrefixCache, clock: FakeClock, *texts: str, namespace: Namespace = MODEL) -> None:
    for text in texts:
        clock.now_s += 1
        publish(cache, text, namespace)
        cache.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_one_shot_prompts_do_not_evict_reused_prompts(policy: str) -> None:
    cache, clock = make_cache(0.5, policy)
    publish_all(cache, clock, "aaaa", "bbbb", "aaaa", "bbbb", *ONE_SHOTS)
    assert [cached(cache, text) for text in ("aaaa", "bbbb")] == [4, 4]
    assert cache.num_probation_blocks == 6
    assert cache.num_evicted_probation_blocks == cache.num_evicted_blocks == len(ONE_SHOTS) - 6


def test_without_a_bound_the_policy_alone_decides() -> None:
    cache, clock = make_cache(1.0)
    publish_all(cache, clock, "aaaa", "aaaa", *ONE_SHOTS)
    assert cached(cache, "aaaa") == 0
    assert (cache.num_probation_blocks, cache.num_evicted_probation_blocks) == (0, 0)


@pytest.mark.parametrize("num_others", [4, 5])
def test_within_their_share_leaves_on_probation_are_evicted_in_the_policys_order(num_others: int) -> None:
    cache, clock = make_cache(0.5)
    publish_all(cache, clock, "aaaa", "aaaa", *ONE_SHOTS[:num_others])
    cache.evict(1)
    assert (cached(cache, "aaaa") == 0) is (num_others == 4)


def test_one_shot_prompts_are_evicted_in_the_policys_order() -> None:
    cache, clock = make_cache(0.0)
    publish_all(cache, clock, *ONE_SHOTS[:4])
    cache.evict(2)
    assert [cached(cache, text) for text in ONE_SHOTS[:4]] == [0, 0, 4, 4]


def test_a_low_priority_is_evicted_before_leaves_on_probation() -> None:
    cache, clock = make_cache(0.0)
    publish_all(cache, clock, "aaaa", "aaaa", "bbbb")
    cache.retain(MODEL, spell("aaaa"), Retention(20))
    cache.evict(1)
    assert [cached(cache, text) for text in ("aaaa", "bbbb")] == [0, 4]


def test_a_high_priority_keeps_leaves_on_probation() -> None:
    cache, clock = make_cache(0.0)
    publish_all(cache, clock, "aaaa", "aaaa", "bbbb")
    cache.retain(MODEL, spell("bbbb"), Retention(80))
    cache.evict(1)
    assert [cached(cache, text) for text in ("aaaa", "bbbb")] == [0, 4]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_tenant_at_its_ceiling_keeps_what_it_reuses(is_named: bool) -> None:
    quota, clock, mine = Quota(ceiling_blocks=4), FakeClock(), Namespace("model", "a")
    cache = PrefixCache(
        16,
        4,
        quotas={"a": quota} if is_named else {},
        default_quota=Quota() if is_named else quota,
        probation_share=0.5,
        clock=clock,
    )
    publish_all(cache, clock, "aaaa", "aaaa", *ONE_SHOTS[:8], namespace=mine)
    assert cached(cache, "aaaa", mine) == 4
    assert cache.tenants["a"].num_probation_blocks == 3


def test_one_shot_prompts_below_a_floor_evict_nothing() -> None:
    clock, protected = FakeClock(), Namespace("model", "a")
    cache = PrefixCache(8, 4, quotas={"a": Quota(floor_blocks=5)}, probation_share=0.5, clock=clock)
    publish_all(cache, clock, *ONE_SHOTS[:5], namespace=protected)
    publish_all(cache, clock, "aaaa", "aaaa", "bbbb")
    cache.evict(1)  # blocks that the floor protects do not count towards the bound, so the older "aaaa" is evicted
    assert [cached(cache, text) for text in ("aaaa", "bbbb")] == [0, 4]


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu"])
@pytest.mark.parametrize("share", [1.0, NEVER_EXCEEDED], ids=["no bound", "never exceeded"])
def test_without_a_bound_leaves_are_evicted_in_the_order_of_the_policys_keys(policy: str, share: float) -> None:
    cache, clock = make_cache(share, policy, num_blocks=24)
    policy_key, dice = make_policy(policy, 24).key, random.Random(1)
    num_choices = 0  # evictions for which there were several leaves
    for _ in range(300):
        publish_all(cache, clock, "".join(dice.choices("abcdefgh", k=dice.randint(1, 16))))
        while cache.pool.num_free < 4:
            entries = [node.eviction_entry for node in cache.nodes() if node.eviction_entry is not None]
            num_choices += len(entries) > 1
            # An entry ends with its leaf, and entry[2] counts arrivals: of equal keys, the first one is evicted.
            expected = min(entries, key=lambda entry: (policy_key(entry[-1]), entry[2]))[-1]
            before = {entry[-1]: entry[-1].num_blocks for entry in entries}
            cache.evict(1)
            after = {node: node.num_blocks for node in cache.nodes()}
            assert [node for node in before if after.get(node) != before[node]] == [expected]
    assert num_choices > 100


def flood() -> list[TraceRequest]:
    """Return requests for twelve recurring prompts, which fill half of a pool of 100 blocks, and for one-shot prompts.

    In each of the first three rounds there are half as many one-shot blocks as the pool has, and in each of three more
    rounds about five times as many as the pool has.
    """
    paths: list[tuple[int, ...]] = []
    for round_number in range(6):
        for prompt in range(12):
            paths.append(tuple(100 * prompt + block for block in range(4)))
            num_one_shots = 1 if round_number < 3 else 10
            paths += [(10**6 + 10 * len(paths) + 10**4 * number, *range(3)) for number in range(num_one_shots)]
    return [TraceRequest(index * 1000, 4 * TOKENS_PER_ID, 1, path) for index, path in enumerate(paths)]


def test_a_flood_evicts_recurring_prompts_only_without_probation() -> None:
    def count_cached_tokens(policy: str, share: float = 1.0) -> int:
        capacity_tokens = 100 * TOKENS_PER_ID
        return simulate(flood(), policy=policy, capacity_tokens=capacity_tokens, probation_share=share).cached_tokens

    best = count_cached_tokens("optimal")
    assert count_cached_tokens("adaptive", 0.5) >= 0.9 * best
    assert count_cached_tokens("adaptive") <= 0.7 * best
