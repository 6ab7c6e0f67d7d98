"""Pins of nodes, and the merging of nodes that are no longer pinned. Blocks have four tokens."""

from __future__ import annotations

import gc
import itertools

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.retention import Retention
from radixkv.cache import namespace_trees
from radixkv.cache.node import NUM_FOLLOWED_NODES, Node, path_to
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, cached, lease_text, publish, spell


def make_cache(policy: str = "lru", num_blocks: int = 64) -> tuple[PrefixCache, FakeClock]:
    clock = FakeClock()
    return PrefixCache(num_blocks, 4, policy=make_policy(policy, num_blocks), clock=clock), clock


def node_sizes(cache: PrefixCache) -> list[int]:
    """Return the number of blocks of each node, parents before children."""
    cache.check()
    return [node.num_blocks for node in cache.nodes()]


def publish_awaiting(cache: PrefixCache, text: str, awaits: Awaits) -> None:
    """Publish a prompt for a session that then waits for `awaits`."""
    with lease_text(cache, text) as lease:
        lease.commit(len(text))
        lease.awaits = awaits


def awaits_of(cache: PrefixCache, text: str) -> list[Awaits]:
    """Return what the session of each node of a path waits for."""
    cache.check()
    return [node.awaits for node in path_to(cache._trees[MODEL].match(spell(text))[0])]


def retain(cache: PrefixCache, text: str, retention: Retention) -> int:
    return cache.retain(MODEL, spell(text), retention).granted_tokens


def test_a_second_lease_of_a_path_changes_only_its_end() -> None:
    cache, _ = make_cache()
    for text in ("aaaabbbbcccc", "aaaabbbbXXXX", "aaaaYYYY"):
        publish(cache, text)
    first = lease_text(cache, "aaaabbbbccccZ")
    ref_counts_before = [node.ref_count for node in path_to(first.node)]
    second = lease_text(cache, "aaaabbbbccccZ")
    assert ref_counts_before == [1, 1, 1]
    assert [node.ref_count for node in path_to(first.node)] == [1, 1, 2]
    other = lease_text(cache, "aaaabbbbXXXXZ")
    assert [node.ref_count for node in path_to(first.node)] == [1, 2, 2]
    for lease in (first, other, second):
        lease.close()
        cache.check()
    assert cache.num_pinned_blocks == 0


def test_a_path_has_what_the_session_of_its_last_lease_waits_for() -> None:
    cache, _ = make_cache()
    publish_awaiting(cache, "aaaabbbb", Awaits.TOOL)
    assert awaits_of(cache, "aaaabbbb") == [Awaits.TOOL]
    publish(cache, "aaaabbbb")
    assert awaits_of(cache, "aaaabbbb") == [Awaits.UNKNOWN]
    first, second = lease_text(cache, "aaaabbbbZ"), lease_text(cache, "aaaabbbbZ")
    first.awaits, second.awaits = Awaits.USER, Awaits.NOTHING
    second.close()
    assert second.node is None
    assert [node.awaits for node in path_to(first.node)] == [Awaits.UNKNOWN]  # the first lease still uses it
    first.close()
    assert awaits_of(cache, "aaaabbbb") == [Awaits.USER]


def test_a_split_keeps_what_the_session_of_the_lower_half_waits_for() -> None:
    cache, _ = make_cache()
    publish_awaiting(cache, "aaaabbbb", Awaits.TOOL)
    publish_awaiting(cache, "aaaaXXXX", Awaits.USER)
    assert awaits_of(cache, "aaaaXXXX") == [Awaits.USER, Awaits.USER]
    assert awaits_of(cache, "aaaabbbb") == [Awaits.USER, Awaits.TOOL]


def test_a_prefix_that_the_cache_splits_keeps_what_its_session_waits_for() -> None:
    cache, _ = make_cache()
    publish_awaiting(cache, "aaaabbbb", Awaits.TOOL)
    retain(cache, "aaaabbbb", Retention(priority=20, end=4))
    assert awaits_of(cache, "aaaabbbb") == [Awaits.TOOL, Awaits.TOOL]


def test_the_end_of_a_session_does_not_change_nodes_that_other_sessions_continued() -> None:
    cache, _ = make_cache()
    publish_awaiting(cache, "aaaabbbbccccdddd", Awaits.TOOL)
    publish_awaiting(cache, "aaaabbbbXXXXYYYY", Awaits.NOTHING)
    assert awaits_of(cache, "aaaabbbbXXXXYYYY") == [Awaits.TOOL, Awaits.NOTHING]
    assert awaits_of(cache, "aaaabbbbccccdddd") == [Awaits.TOOL, Awaits.TOOL]


def test_the_short_end_of_an_earlier_prompt_does_not_count_as_another_session() -> None:
    cache, _ = make_cache()
    publish_awaiting(cache, "aaaabbbbcc", Awaits.TOOL)
    publish_awaiting(cache, "aaaabbbbXXXXYYYY", Awaits.NOTHING)
    assert awaits_of(cache, "aaaabbbbXXXXYYYY") == [Awaits.NOTHING, Awaits.NOTHING]


def test_nodes_that_a_high_priority_split_stay_separate_after_it_has_expired_until_they_are_evicted() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbbccccdddd")
    retain(cache, "aaaabbbbccccdddd", Retention(priority=80, ttl_s=5, start=4, end=8))
    publish(cache, "aaaabbbbccccdddd")
    assert node_sizes(cache) == [1, 1, 2]
    clock.now_s = 6
    cache.evict(0)
    publish(cache, "aaaabbbbccccdddd")
    assert node_sizes(cache) == [
        1,
        1,
        2,
    ]  # the middle node has expired, and the reason of a later miss of it is EXPIRED
    cache.evict(64)
    publish(cache, "aaaabbbbccccdddd")
    assert node_sizes(cache) == [4]


def test_nodes_that_a_low_priority_split_are_joined_when_they_are_used_after_it_has_expired() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbbccccdddd")
    retain(cache, "aaaabbbbccccdddd", Retention(priority=20, ttl_s=5, start=4, end=8))
    clock.now_s = 6
    cache.evict(0)
    publish(cache, "aaaabbbbccccdddd")
    assert node_sizes(cache) == [4]
    assert cached(cache, "aaaabbbbccccdddd") == 16


@pytest.mark.parametrize(("policy", "are_joined"), [("lru", True), ("lfu", False), ("slru", False), ("adaptive", True)])
def test_nodes_are_joined_after_a_branch_was_evicted_if_the_policy_finds_them_alike(
    policy: str, *, are_joined: bool
) -> None:
    cache, clock = make_cache(policy)
    publish(cache, "aaaabbbb")
    publish(cache, "aaaaXXXX")  # uses aaaa, and is evicted first
    lease = lease_text(cache, "aaaabbbbZ")
    cache.evict(1)
    assert cached(cache, "aaaaXXXX") == 4
    clock.now_s = 1
    lease.close()
    assert node_sizes(cache) == ([2] if are_joined else [1, 1])


def test_nodes_are_not_joined_while_a_lease_ends_between_them() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbb")
    retain(cache, "aaaabbbb", Retention(priority=20, ttl_s=5, end=4))
    clock.now_s = 6
    cache.evict(0)
    between = lease_text(cache, "aaaaZ")
    lease_text(cache, "aaaabbbbZ").close()
    assert node_sizes(cache) == [1, 1]
    between.close()
    lease_text(cache, "aaaabbbbZ").close()
    assert node_sizes(cache) == [2]


def test_nodes_of_a_purged_tree_are_not_joined() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbb")
    retain(cache, "aaaabbbb", Retention(priority=20, ttl_s=5, end=4))
    clock.now_s = 6
    cache.evict(0)
    lease = lease_text(cache, "aaaabbbbZ")
    cache.purge()
    publish(cache, "aaaa")
    lease.close()
    assert node_sizes(cache) == [1]


def test_only_the_last_nodes_of_a_deep_path_are_followed() -> None:
    """Uses are counted for the last nodes only. Pins and times of use are right for all nodes."""
    cache, clock = make_cache("adaptive", num_blocks=512)
    stem = "".join(chr(ord("a") + index % 20) * 4 for index in range(100))
    publish(cache, stem)
    for num_blocks in range(1, 100):  # each branch splits the path after another block
        publish(cache, stem[: 4 * num_blocks] + "Z" * 4)
    clock.now_s = 10
    lease = lease_text(cache, stem + "Y")
    path = path_to(lease.node)
    assert len(path) == 100
    assert cache.num_pinned_blocks == 100
    num_uses_before = [node.num_uses for node in path]
    lease_text(cache, stem + "Y").close()
    num_new_uses = [node.num_uses - before for node, before in zip(path, num_uses_before, strict=True)]
    assert num_new_uses == [0] * (100 - NUM_FOLLOWED_NODES) + [1] * NUM_FOLLOWED_NODES
    clock.now_s = 20
    lease.close()
    assert {node.last_used_s for node in path} == {20}
    assert cache.num_pinned_blocks == 0
    cache.check()


def test_a_path_of_very_many_nodes_is_not_split_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_trees, "_MAX_CUT_NODES", 3)
    cache, _ = make_cache()
    text = "aaaabbbbccccddddeeeeffff"
    publish(cache, text)
    assert retain(cache, text, Retention(priority=20, start=4, end=8)) == 4
    assert retain(cache, text, Retention(priority=20, start=12, end=16)) == 4
    assert node_sizes(cache) == [1, 1, 1, 1, 2]
    assert retain(cache, text, Retention(priority=30, start=20)) == 0  # it begins inside a node
    assert retain(cache, text, Retention(priority=30, start=16, end=20)) == 0  # it ends inside one
    assert retain(cache, text, Retention(priority=30, start=12, end=20)) == 4
    assert node_sizes(cache) == [1, 1, 1, 1, 2]


def test_a_node_that_was_joined_into_another_is_no_segment() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbbccccdddd")
    retain(cache, "aaaabbbbccccdddd", Retention(priority=20, ttl_s=5, start=4, end=8))
    assert len(cache.segments) == 3
    clock.now_s = 6
    cache.evict(0)
    publish(cache, "aaaabbbbccccdddd")
    assert len(cache.segments) == 1


def test_nodes_that_were_joined_into_another_are_freed_without_a_collection() -> None:
    cache, clock = make_cache()
    publish(cache, "aaaabbbbccccdddd")
    retain(cache, "aaaabbbbccccdddd", Retention(priority=20, ttl_s=5, start=4, end=8))
    ids = {id(node) for node in cache.nodes()}
    clock.now_s = 6
    cache.evict(0)
    gc.disable()
    try:
        publish(cache, "aaaabbbbccccdddd")
        assert len(ids) == 3
        assert len([each for each in gc.get_objects() if type(each) is Node and id(each) in ids]) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", ["adaptive", "lru", "lfu"])
@pytest.mark.parametrize("is_shortest_first", [True, False])
def test_a_path_that_many_branches_cut_loses_the_oldest_of_them(
    policy: str, *, is_shortest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, clock = make_cache(policy, num_blocks=128)
    text = "".join(letter * 4 for letter in "abcdefghijklmnopqrst")
    publish(cache, text)
    num_blocks_before_branches = range(1, 20) if is_shortest_first else range(19, 0, -1)
    for num_blocks in num_blocks_before_branches:
        clock.now_s += 1
        publish(cache, text[: 4 * num_blocks] + "ZZZZ" + text[:num_blocks])
    monkeypatch.setattr("radixkv.cache.evictor.MAX_PATH_NODES", 8)
    monkeypatch.setattr("radixkv.cache.evictor._MAX_THINNED_AT_ONCE", 3)
    num_nodes, num_evicted = [], []
    for _ in range(8):
        clock.now_s += 1
        with lease_text(cache, text + "Z") as lease:
            num_nodes.append(lease.num_nodes)
        num_evicted.append(cache.num_evicted_blocks)
        cache.check()
    assert num_nodes[-1] == num_nodes[-2] <= 8
    assert all(after <= max(8, before - 3) for before, after in itertools.pairwise(num_nodes))
    assert num_evicted[-1] == num_evicted[-2] > 0, "branches of a path that is short enough stay"
    assert cached(cache, text) == len(text)
    num_blocks = num_blocks_before_branches[-1]
    assert cached(cache, text[: 4 * num_blocks] + "ZZZZ") == 4 * num_blocks + 4, "the newest branch stays"


def test_branches_in_use_and_retained_ones_stay_however_deep_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = make_cache()
    for text in ("aaaabbbbccccdddd", "aaaaZZZZ", "aaaabbbbZZZZ", "aaaabbbbccccZZZZ"):
        publish(cache, text)
    monkeypatch.setattr("radixkv.cache.evictor.MAX_PATH_NODES", 2)
    retain(cache, "aaaaZZZZ", Retention(priority=80, start=4))
    used = lease_text(cache, "aaaabbbbZZZZZ")
    for _ in range(3):
        lease_text(cache, "aaaabbbbccccddddZ").close()
    assert [cached(cache, text) for text in ("aaaaZZZZ", "aaaabbbbZZZZ", "aaaabbbbccccZZZZ")] == [8, 12, 12]
    used.close()
    cache.check()
