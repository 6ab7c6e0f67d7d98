"""The default policy, which learns from leaves that are used again. Blocks have four tokens."""

from __future__ import annotations

import math

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.retention import Retention
from radixkv.cache.adaptive_policy import AdaptivePolicy, HitDensities
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, cached, lease_text, publish, spell

OLD = 15  # some kind of reused nodes


def learned_from(kind: int, waits_s: list[float], num_unused: int) -> HitDensities:
    densities = HitDensities()
    for wait_s in waits_s:
        densities.wait(kind, 10)
        densities.hit(kind, 10, math.log2(wait_s))
    for _ in range(num_unused):
        densities.wait(kind, 10)
    densities.update()
    return densities


def test_the_density_is_the_hits_in_the_best_period_divided_by_its_block_seconds() -> None:
    densities = learned_from(OLD, [64.0] * 1000, num_unused=0)
    assert densities.density(OLD, 0.1) == pytest.approx(1 / 64, rel=0.3)
    assert densities.density(OLD, 50.0) > 2 * densities.density(OLD, 0.1)  # the use is nearer
    assert densities.density(OLD, 100.0) < 1e-9  # it did not happen
    halved = learned_from(OLD, [64.0] * 1000, num_unused=1000)
    assert halved.density(OLD, 0.1) == pytest.approx(0.5 / 64, rel=0.3)


def test_a_kind_with_few_uses_has_the_density_of_its_group() -> None:
    densities = learned_from(OLD, [8.0] * 1000, num_unused=0)
    densities.wait(OLD + 1, 10)
    densities.update()
    assert densities.density(OLD + 1, 1.0) == pytest.approx(densities.density(OLD, 0.1), rel=0.6)


def test_what_a_session_awaits_is_a_kind_of_its_own() -> None:
    cache, _, policy = make_adaptive_cache()
    kinds = set()
    for awaits in Awaits:
        with lease_text(cache, "aaaabbbb") as lease:
            lease.commit(8)
            lease.awaits = awaits
        kinds.add(policy.kind(next(iter(cache.nodes()))))
        assert sum(policy.densities.node_waits) == len(kinds)
    assert len(kinds) == len(Awaits)


@pytest.mark.parametrize("num_at_a_time", [1, 16, 29, 34, 64])
def test_a_kind_that_all_nodes_leave_has_the_density_of_its_group(num_at_a_time: int) -> None:
    densities, left = HitDensities(), OLD + 41
    for number in range(20_000):
        densities.wait(OLD, 10)
        if number >= num_at_a_time:
            densities.move(OLD, left, 10)
            densities.hit(left, 10, math.log2(8.0))
        if number % 256 == 0:
            densities.forget(0.99)
    for _ in range(num_at_a_time):
        densities.move(OLD, left, 10)
    densities.update()
    assert 0 <= densities.density(OLD, 8.0) <= 1


@pytest.mark.parametrize("ends_first", [True, False])
def test_the_kind_of_an_ended_session_does_not_depend_on_the_order_of_calls(*, ends_first: bool) -> None:
    cache, _, policy = make_adaptive_cache()
    lease = cache.lease(MODEL, spell("aaaabbbb"), session_id="s")
    lease.commit(8)
    lease.awaits = Awaits.TOOL
    if not ends_first:
        lease.close()
    cache.end_session("", "s")
    lease.close()
    (node,) = cache.nodes()
    assert policy.kind(node) // (len(policy.densities.block_waits) // len(Awaits)) == Awaits.NOTHING


def test_setting_what_a_session_awaits_sets_the_kind() -> None:
    cache, _, policy = make_adaptive_cache()
    publish(cache, "aaaabbbb")
    (node,) = cache.nodes()
    kinds = []
    for awaits in (Awaits.TOOL, Awaits.UNKNOWN):
        cache.set_awaits(MODEL, spell("aaaabbbb"), awaits)
        kinds.append(policy.kind(node) // (len(policy.densities.block_waits) // len(Awaits)))
    assert kinds == [Awaits.TOOL, Awaits.UNKNOWN]
    cache.check()


def test_what_an_ended_session_used_is_evicted_first() -> None:
    cache, clock, _ = make_adaptive_cache()
    publish(cache, "aaaa")
    clock.now_s = 1
    with lease_text(cache, "bbbb") as lease:
        lease.commit(4)
        lease.awaits = Awaits.NOTHING
    clock.now_s = 2
    publish(cache, "cccc")
    cache.evict(1)
    assert [cached(cache, text) for text in ("aaaa", "bbbb", "cccc")] == [4, 0, 4]


def test_the_policy_begins_as_least_recently_used() -> None:
    cache, clock, _ = make_adaptive_cache()
    for text in ("aaaa", "bbbb", "aaaa"):
        clock.now_s += 1
        publish(cache, text)
    cache.evict(1)
    assert [cached(cache, text) for text in ("aaaa", "bbbb")] == [4, 0]


def make_adaptive_cache(num_blocks: int = 32) -> tuple[PrefixCache, FakeClock, AdaptivePolicy]:
    clock, policy = FakeClock(), AdaptivePolicy(num_blocks)
    return PrefixCache(num_blocks, 4, policy=policy, clock=clock), clock, policy


def num_hits(policy: AdaptivePolicy) -> float:
    return sum(map(sum, policy.densities.hits))


def test_new_blocks_after_reused_ones_are_evicted_as_new_ones() -> None:
    cache, _, policy = make_adaptive_cache()
    publish(cache, "aaaabbbb")
    publish(cache, "aaaabbbbcccc")
    (node,) = cache.nodes()
    assert policy.num_offered_blocks(node) == 1
    new_kind = policy.kind(node)
    cache.evict(1)
    assert policy.num_offered_blocks(node) == 2
    assert policy.kind(node) != new_kind


def test_the_number_of_remembered_leaves_is_bounded() -> None:
    cache, clock, policy = make_adaptive_cache(8)
    for index in range(5000):
        clock.now_s += 1
        publish(cache, chr(1000 + index) * 4)
    assert len(policy._ghosts) == 4096


def test_a_leaf_that_returns_after_its_eviction_is_learned_from() -> None:
    cache, clock, policy = make_adaptive_cache(4)
    publish(cache, "aaaabbbb")
    cache.evict(1)  # the leaf is shortened first: both parts are remembered
    cache.evict(1)
    clock.now_s = 60
    publish(cache, "aaaabbbbcccc")
    assert num_hits(policy) == 2
    (node,) = cache.nodes()
    assert (node.policy_note.num_uses, node.policy_note.num_blocks, node.policy_note.num_new_blocks) == (1, 2, 1)


def test_what_is_learned_does_not_depend_on_where_a_path_is_cut() -> None:
    def learned(*, cuts: bool) -> float:
        cache, clock, policy = make_adaptive_cache()
        publish(cache, "aaaabbbbccccdddd")
        if cuts:
            for start in (8, 4, 12):
                cache.retain(MODEL, spell("aaaabbbbccccdddd"), Retention(20, start=start))
            assert len(cache.segments) == 4
        clock.now_s = 7
        publish(cache, "aaaabbbbccccddddeeee")
        return num_hits(policy)

    assert learned(cuts=True) == learned(cuts=False) == 4


def test_a_leaf_that_returns_in_chunks_is_learned_from_as_if_at_once() -> None:
    def learned(*ends: int) -> float:
        cache, clock, policy = make_adaptive_cache(8)
        publish(cache, "aaaabbbbccccdddd")
        cache.evict(4)
        clock.now_s = 60
        with cache.lease(MODEL, spell("aaaabbbbccccddddeeee")) as lease:
            for end in ends:
                lease.commit(end)
        return num_hits(policy)

    assert learned(20) == learned(4, 8, 12, 16, 20) == 4
