"""The default policy, which learns from leaves that are used again. Blocks have four tokens."""

from __future__ import annotations

import math

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.retention import Retention
from radixkv.cache.adaptive_policy import AdaptivePolicy, HitDensities
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, cached, lease_text, publish, spell

NUM_KINDS = len(HitDensities().node_waits) // len(Awaits)  # of one value of `Awaits`
REUSED_KIND = 15  # any kind of reused nodes


def learn_densities(kind: int, waits_s: list[float], num_unused: int) -> HitDensities:
    """Return what is learned from nodes of ten blocks: one is used after each wait, and `num_unused` never are."""
    densities = HitDensities()
    for wait_s in waits_s:
        densities.wait(kind, 10)
        densities.hit(kind, 10, math.log2(wait_s))
    for _ in range(num_unused):
        densities.wait(kind, 10)
    densities.update()
    return densities


def make_adaptive_cache(num_blocks: int = 32) -> tuple[PrefixCache, FakeClock, AdaptivePolicy]:
    clock, policy = FakeClock(), AdaptivePolicy(num_blocks)
    return PrefixCache(num_blocks, 4, policy=policy, clock=clock), clock, policy


def num_hit_blocks(policy: AdaptivePolicy) -> float:
    return sum(map(sum, policy.densities.hits))


def test_the_density_is_the_hits_in_the_best_period_divided_by_its_block_seconds() -> None:
    densities = learn_densities(REUSED_KIND, [64.0] * 1000, num_unused=0)
    assert densities.density(REUSED_KIND, 0.1) == pytest.approx(1 / 64, rel=0.3)
    assert densities.density(REUSED_KIND, 50.0) > 2 * densities.density(REUSED_KIND, 0.1)  # the use comes in 14 s
    assert densities.density(REUSED_KIND, 100.0) < 1e-9  # no node was used after more than 64 s
    half_unused = learn_densities(REUSED_KIND, [64.0] * 1000, num_unused=1000)
    assert half_unused.density(REUSED_KIND, 0.1) == pytest.approx(0.5 / 64, rel=0.3)


def test_a_kind_with_few_uses_has_the_density_of_its_group() -> None:
    densities = learn_densities(REUSED_KIND, [8.0] * 1000, num_unused=0)
    densities.wait(REUSED_KIND + 1, 10)
    densities.update()
    assert densities.density(REUSED_KIND + 1, 1.0) == pytest.approx(densities.density(REUSED_KIND, 0.1), rel=0.6)


def test_nodes_of_each_value_of_awaits_have_a_kind_of_their_own() -> None:
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
def test_the_density_of_a_kind_that_all_nodes_have_left_is_valid(num_at_a_time: int) -> None:
    """Since old counts are reduced, the counts of a kind are below zero after all its nodes have moved."""
    densities, next_kind = HitDensities(), REUSED_KIND + NUM_KINDS  # the same pace, and the next value of `Awaits`
    for number in range(20_000):
        densities.wait(REUSED_KIND, 10)
        if number >= num_at_a_time:
            densities.move(REUSED_KIND, next_kind, 10)
            densities.hit(next_kind, 10, math.log2(8.0))
        if number % 256 == 0:
            densities.forget(0.99)
    for _ in range(num_at_a_time):
        densities.move(REUSED_KIND, next_kind, 10)
    densities.update()
    assert 0 <= densities.density(REUSED_KIND, 8.0) <= 1


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
    assert policy.kind(node) // NUM_KINDS == Awaits.NOTHING


def test_setting_what_a_session_awaits_sets_the_kind() -> None:
    cache, _, policy = make_adaptive_cache()
    publish(cache, "aaaabbbb")
    (node,) = cache.nodes()
    awaits_of_kinds = []
    for awaits in (Awaits.TOOL, Awaits.UNKNOWN):
        cache.set_awaits(MODEL, spell("aaaabbbb"), awaits)
        awaits_of_kinds.append(policy.kind(node) // NUM_KINDS)
    assert awaits_of_kinds == [Awaits.TOOL, Awaits.UNKNOWN]
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


def test_new_blocks_of_a_session_that_waits_for_a_tool_are_of_the_kind_of_the_reused_ones() -> None:
    kinds: dict[Awaits, tuple[int, int]] = {}
    for awaits in (Awaits.TOOL, Awaits.USER):
        cache, _, policy = make_adaptive_cache()
        publish(cache, "aaaabbbb")
        with cache.lease(MODEL, spell("aaaabbbbcccc"), session_id="s") as lease:
            lease.commit(12)
            lease.awaits = awaits
        (node,) = cache.nodes()
        kind_with_new_block = policy.kind(node)
        cache.evict(1)
        kinds[awaits] = kind_with_new_block, policy.kind(node)
    assert kinds[Awaits.TOOL][0] == kinds[Awaits.TOOL][1]
    assert kinds[Awaits.USER][0] != kinds[Awaits.USER][1]


def use_in_session(cache: PrefixCache, clock: FakeClock, text: str, now_s: float) -> None:
    clock.now_s = now_s
    with cache.lease(MODEL, spell(text), session_id="s") as lease:
        lease.commit(len(text))
        lease.awaits = Awaits.TOOL


@pytest.mark.parametrize("num_evicted_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_ends", [(16,), (4, 8, 12, 16)])
def test_what_is_loaded_ahead_of_its_next_use_waits_as_if_it_had_stayed(
    num_evicted_blocks: int, chunk_ends: tuple[int, ...]
) -> None:
    def observe_policy(*, is_evicted: bool) -> tuple[object, ...]:
        cache, clock, policy = make_adaptive_cache()
        for now_s, length in ((1, 8), (3, 12), (9, 16)):
            use_in_session(cache, clock, "aaaabbbbccccdddd"[:length], now_s)
        clock.now_s = 12
        publish(cache, "xxxx")
        if is_evicted:
            cache.evict(num_evicted_blocks)
            clock.now_s = 20
            with cache.lease(
                MODEL, spell("aaaabbbbccccdddd"), is_prefetch=True, prior_use_s=9, session_id="s"
            ) as lease:
                for end in chunk_ends:
                    lease.commit(end)
        cache.check()
        waiting_nodes = [(node.policy_note.num_uses, policy.kind(node)) for node in cache.nodes()]
        use_in_session(cache, clock, "aaaabbbbccccddddeeee", 27)
        used_nodes = [(node.last_used_s, node.policy_note.log_pace) for node in cache.nodes()]
        return num_hit_blocks(policy), sum(policy.densities.block_waits), sorted(waiting_nodes), sorted(used_nodes)

    assert observe_policy(is_evicted=True) == observe_policy(is_evicted=False)


@pytest.mark.parametrize("has_learned", [True, False])
def test_what_is_loaded_ahead_is_as_old_as_its_last_use_once_the_policy_has_learned(*, has_learned: bool) -> None:
    cache, clock, policy = make_adaptive_cache(8)
    for number in range(32 if has_learned else 0):  # four times the blocks of the cache
        publish(cache, chr(1000 + number) * 4)
    use_in_session(cache, clock, "aaaabbbb", 1)
    clock.now_s = 5
    cache.lease(MODEL, spell("aaaabbbb"), is_prefetch=True, prior_use_s=1, session_id="s").close()
    (node,) = (each for each in cache.nodes() if each.session is not None)
    assert policy.key(node) == (1 if has_learned else 5)


def test_a_prefetch_does_not_renew_a_retention_ahead_of_the_next_use() -> None:
    num_retained_blocks = []
    for prior_use_s in (None, 0.0):
        cache, clock, _ = make_adaptive_cache()
        publish(cache, "aaaabbbb")
        cache.retain(MODEL, spell("aaaabbbb"), Retention(80, 10, renew=True))
        clock.now_s = 8
        cache.lease(MODEL, spell("aaaabbbb"), is_prefetch=True, prior_use_s=prior_use_s).close()
        clock.now_s = 12
        num_retained_blocks.append(cache.num_retained_blocks)
    assert num_retained_blocks == [2, 0], "without the time of the prior use, a prefetch counts as a use"


def test_the_number_of_remembered_leaves_is_bounded() -> None:
    cache, clock, policy = make_adaptive_cache(8)
    for index in range(5000):
        clock.now_s += 1
        publish(cache, chr(1000 + index) * 4)
    assert len(policy._ghosts) == 4096, "the minimum, since the cache has only 8 blocks"


def test_a_leaf_that_returns_after_its_eviction_is_learned_from() -> None:
    cache, clock, policy = make_adaptive_cache(4)
    publish(cache, "aaaabbbb")
    cache.evict(1)  # the leaf is shortened first: both parts are remembered
    cache.evict(1)
    clock.now_s = 60
    publish(cache, "aaaabbbbcccc")
    assert num_hit_blocks(policy) == 2
    (node,) = cache.nodes()
    assert (node.policy_note.num_uses, node.policy_note.num_blocks, node.policy_note.num_new_blocks) == (1, 2, 1)


def test_what_is_learned_does_not_depend_on_where_a_path_is_cut() -> None:
    def count_hits(*, cuts: bool) -> float:
        cache, clock, policy = make_adaptive_cache()
        publish(cache, "aaaabbbbccccdddd")
        if cuts:
            for start in (8, 4, 12):
                cache.retain(MODEL, spell("aaaabbbbccccdddd"), Retention(20, start=start))
            assert len(cache.segments) == 4
        clock.now_s = 7
        publish(cache, "aaaabbbbccccddddeeee")
        return num_hit_blocks(policy)

    assert count_hits(cuts=True) == count_hits(cuts=False) == 4


def test_a_leaf_that_returns_in_chunks_is_learned_from_as_if_at_once() -> None:
    def count_hits(*chunk_ends: int) -> float:
        cache, clock, policy = make_adaptive_cache(8)
        publish(cache, "aaaabbbbccccdddd")
        cache.evict(4)
        clock.now_s = 60
        with cache.lease(MODEL, spell("aaaabbbbccccddddeeee")) as lease:
            for end in chunk_ends:
                lease.commit(end)
        return num_hit_blocks(policy)

    assert count_hits(20) == count_hits(4, 8, 12, 16, 20) == 4
