"""The cache as a whole: what is reused, who owns which block, and what a full pool does."""

from __future__ import annotations

import pytest

from radixkv.blocks import BlockCopy
from radixkv.cache.block_pool import BlockState
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import InvalidRequest, InvariantViolation, OutOfBlocks
from radixkv.namespace import Namespace
from tests.fakes import MODEL, FakeClock, cached, lease_text, publish, spell


def make_cache(num_blocks: int = 32, block_size: int = 4) -> PrefixCache:
    return PrefixCache(num_blocks, block_size, clock=FakeClock())


def state(cache: PrefixCache) -> tuple[object, ...]:
    """Return all that calls without an effect must not change. The nodes of the trees come last."""
    pool = cache.pool
    states = list(pool.states())
    segments = [
        (node.tokens, node.block_ids, node.ref_count, node.last_used_s, node.eviction_entry)
        for tree in cache._trees.values()
        for node in tree.nodes()
    ]
    return pool.num_free, pool.num_published, states, cache.num_evicted_blocks, cache.num_pinned_blocks, segments


def assert_all_free(cache: PrefixCache) -> None:
    cache.evict(cache.pool.num_blocks)
    cache.check()
    assert cache.pool.num_free == cache.pool.num_blocks
    assert (cache.num_namespaces, len(cache.segments)) == (0, 0)


def test_an_empty_cache_matches_nothing() -> None:
    match = make_cache().match(MODEL, spell("abc"))
    assert match.cached_tokens == 0
    assert match.block_ids.size == 0


@pytest.mark.parametrize(
    ("prompt", "cached_tokens"),
    [
        ("a", 0),
        ("ab", 1),
        ("abcd", 3),
        ("abcde", 4),
        ("abcdef", 5),
        ("abcdefg", 6),
        ("abcdeX", 5),
        ("abX", 2),
        ("X", 0),
    ],
)
def test_a_match_is_exact_to_the_token_and_leaves_the_last_one(prompt: str, cached_tokens: int) -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdef")
    match = cache.match(MODEL, spell(prompt))
    assert match.cached_tokens == cached_tokens
    assert match.block_ids.tolist() == block_ids[: -(-cached_tokens // 4)]


def test_a_match_changes_nothing() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh")
    before = state(cache)
    for prompt in ("abcdefgh", "abcdX", "abX", "X"):
        cache.match(MODEL, spell(prompt))
    assert state(cache) == before


def test_a_match_can_not_be_written_through() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh")
    with pytest.raises(ValueError, match="read-only"):
        cache.match(MODEL, spell("abcdefgh")).block_ids[0] = 7


@pytest.mark.parametrize("tokens", [b"", b"\1", b"\1\0\0\0\1"])
def test_a_prompt_is_one_or_more_whole_tokens(tokens: bytes) -> None:
    cache = make_cache()
    with pytest.raises(InvalidRequest, match=f"got {len(tokens)} bytes"):
        cache.match(MODEL, tokens)
    with pytest.raises(InvalidRequest, match=f"got {len(tokens)} bytes"):
        cache.lease(MODEL, tokens)
    assert_all_free(cache)


@pytest.mark.parametrize("field", Namespace._fields)
def test_namespaces_share_nothing(field: str) -> None:
    cache, mine = make_cache(), Namespace("model", "tenant", "adapter", "salt")
    other = mine._replace(**{field: "other"})
    publish(cache, "abcdefgh", mine)
    assert cached(cache, "abcdefgh", mine) == 8
    assert cached(cache, "abcdefgh", other) == 0
    assert publish(cache, "abcdefgh", other) != publish(cache, "abcdefgh", mine)
    assert cache.num_namespaces == 2
    assert cached(cache, "abcdefgh", mine._replace()) == 8


def test_names_that_join_to_the_same_text_share_nothing() -> None:
    cache = make_cache()
    publish(cache, "abcd", Namespace("model", "a", "bc"))
    assert cached(cache, "abcd", Namespace("model", "a", "bc")) == 4
    assert cached(cache, "abcd", Namespace("model", "ab", "c")) == 0
    assert cached(cache, "abcd", Namespace("model", "abc")) == 0


def test_an_adapter_reloaded_under_its_name_reuses_nothing() -> None:
    cache = make_cache()
    publish(cache, "abcd", Namespace("model", adapter="digest of version 1"))
    assert cached(cache, "abcd", Namespace("model", adapter="digest of version 2")) == 0
    assert cached(cache, "abcd", Namespace("model", adapter="digest of version 1")) == 4


def test_a_namespace_without_tokens_is_forgotten() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    assert cache.num_namespaces == 1
    cache.evict(1)
    assert cache.num_namespaces == 0
    publish(cache, "abcd")
    assert cached(cache, "abcd") == 4


def test_a_cold_lease_owns_a_block_for_every_token() -> None:
    cache = make_cache()
    lease = lease_text(cache, "abcdefghi")
    cache.check()
    assert (lease.cached_tokens, lease.num_tokens, lease.copy) == (0, 9, None)
    assert lease.block_ids.size == 3
    assert (cache.pool.num_leased, cache.pool.num_published) == (3, 0)
    lease.close()
    assert_all_free(cache)


def test_a_lease_shares_whole_blocks_and_copies_the_one_shared_in_part() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdefghij")
    lease = lease_text(cache, "abcdefXXXX")
    cache.check()
    assert lease.cached_tokens == 6
    assert lease.block_ids[0] == block_ids[0]
    assert lease.copy == BlockCopy(block_ids[1], int(lease.block_ids[1]))
    assert not set(lease.block_ids[1:].tolist()) & set(block_ids)
    assert lease.num_published_blocks == 1
    lease.close()
    assert_all_free(cache)


def test_a_prefix_that_ends_with_a_block_needs_no_copy() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdefgh")
    with lease_text(cache, "abcdXX") as lease:
        assert (lease.cached_tokens, lease.copy) == (4, None)
        assert lease.block_ids[0] == block_ids[0]


def test_a_full_hit_still_computes_one_token() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdefgh")
    with lease_text(cache, "abcdefgh") as lease:
        assert lease.cached_tokens == 7
        assert lease.copy == BlockCopy(block_ids[1], int(lease.block_ids[1]))
        assert cache.pool.num_leased == 1
        assert lease.commit(8) == 0
        assert lease.block_ids.tolist() == block_ids
        assert cache.pool.num_leased == 0


def test_a_lease_that_does_not_read_reuses_nothing() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdefgh")
    with cache.lease(MODEL, spell("abcdefgh"), read=False) as lease:
        assert (lease.cached_tokens, lease.copy) == (0, None)
        assert not set(lease.block_ids.tolist()) & set(block_ids)
        assert cache.num_pinned_blocks == 0


def test_a_lease_pins_its_path_and_closing_unpins_it() -> None:
    cache = make_cache()
    publish(cache, "abcdefgh")
    publish(cache, "abcdEFGH")
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (0, 3)
    outer = lease_text(cache, "abcdefghXX")
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (2, 1)
    inner = lease_text(cache, "abcdEFGHXX")
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (3, 0)
    outer.close()
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (2, 1)
    inner.close()
    cache.check()
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (0, 3)


def test_nothing_is_matchable_before_it_is_committed() -> None:
    cache = make_cache()
    lease = lease_text(cache, "abcdefgh")
    assert cached(cache, "abcdefgh") == 0
    lease.commit(4)
    assert cached(cache, "abcdefgh") == 4
    lease.close()
    assert cached(cache, "abcdefgh") == 4


@pytest.mark.parametrize(
    ("upto", "published"), [(0, 0), (3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8), (10, 10)], ids=str
)
def test_a_commit_publishes_whole_blocks_and_the_prompts_end(upto: int, published: int) -> None:
    cache = make_cache()
    lease = lease_text(cache, "abcdefghij")
    assert lease.commit(upto) == published
    assert lease.committed_tokens == published
    assert cached(cache, "abcdefghij") == published
    assert cache.pool.num_published == -(-published // 4)
    cache.check()
    lease.close()
    assert_all_free(cache)


def test_commits_continue_where_the_last_one_ended() -> None:
    cache = make_cache()
    with lease_text(cache, "abcdefghij") as lease:
        assert [lease.commit(upto) for upto in (2, 5, 5, 4, 9, 10, 10)] == [0, 4, 0, 0, 4, 2, 0]
        assert len(cache.segments) == 1
        cache.check()


def test_a_commit_of_reused_tokens_publishes_nothing() -> None:
    cache = make_cache()
    publish(cache, "abcdef")
    with lease_text(cache, "abcdefghij") as lease:
        copy = lease.copy
        assert [lease.commit(upto) for upto in (4, 6, 7)] == [0, 0, 0]
        assert lease.copy == copy
        assert copy is not None
        assert lease.commit(8) == 2


def test_the_first_commit_unpins_the_copied_block() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdefgh")
    with lease_text(cache, "abcdeXXXXX") as lease:
        assert cache.evict(1) == 0
        lease.commit(8)
        assert lease.copy is None
        assert cache.evict(1) == 1
        assert cache.pool.states()[block_ids[1]] == BlockState.FREE
        assert cache.num_pinned_blocks == 2
        cache.check()


def test_the_copied_block_stays_until_the_first_commit() -> None:
    cache = make_cache(num_blocks=5)
    block_ids = publish(cache, "abcdefgh")
    with lease_text(cache, "abcdefgX") as lease:
        assert cache.evict(5) == 0
        publish(cache, "abcdefgh")
        assert lease.copy is not None
        assert lease.copy.source == block_ids[1]
        assert cache.pool.states()[block_ids[1]] == BlockState.PUBLISHED


def test_the_copied_block_outlives_its_replacement() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdef")
    lease = lease_text(cache, "abcdefXX")
    publish(
        cache, "abcdefghij"
    )  # the leaf grows: its second block is now the block of the lease that published the longer text
    cache.check()
    assert lease.copy is not None
    assert lease.copy.source == block_ids[1]
    assert cache.pool.states()[block_ids[1]] == BlockState.LEASED
    num_free = cache.pool.num_free
    lease.commit(8)
    assert cache.pool.num_free == num_free + 1
    cache.check()
    lease.close()
    assert_all_free(cache)


def test_blocks_published_first_by_another_lease_are_adopted() -> None:
    cache = make_cache()
    first, second = lease_text(cache, "abcdefghij"), lease_text(cache, "abcdefghXX")
    own = second.block_ids.tolist()
    first.commit(10)
    num_free = cache.pool.num_free
    assert second.commit(10) == 2
    cache.check()
    assert second.block_ids.tolist() == [*first.block_ids[:2].tolist(), own[2]]
    assert cache.pool.num_free == num_free + 2
    for block_id in own[:2]:
        assert cache.pool.states()[block_id] == BlockState.FREE
    for block_id in second.block_ids:
        assert cache.pool.states()[int(block_id)] == BlockState.PUBLISHED


def test_a_run_inserted_again_releases_exactly_its_duplicate_blocks() -> None:
    cache = make_cache()
    publish(cache, "abcdefghij")
    num_free = cache.pool.num_free
    with cache.lease(MODEL, spell("abcdefghij"), read=False) as lease:
        tail = lease.block_ids[2]
        assert cache.pool.num_free == num_free - 3
        assert lease.commit(10) == 0
        assert cache.pool.num_free == num_free - 1
        assert lease.block_ids[2] == tail  # a tail block is not adopted: the lease may hold more of it
        cache.check()
    assert cache.pool.num_free == num_free


def test_a_commit_counts_only_tokens_that_no_other_lease_published() -> None:
    cache = make_cache()
    slow = lease_text(cache, "abcdefghXXXX")
    publish(cache, "abcdefgY")
    assert slow.commit(8) == 1
    assert slow.commit(12) == 4
    slow.close()


def test_a_commit_beyond_the_prompt_is_refused_and_changes_nothing() -> None:
    cache = make_cache()
    with lease_text(cache, "abcdef") as lease:
        before = state(cache)
        for upto in (7, -1):
            with pytest.raises(InvalidRequest, match=f"expected 0 to 6, got {upto}"):
                lease.commit(upto)
        assert state(cache) == before
        assert lease.committed_tokens == 0


def test_a_split_under_leases_keeps_both_halves_balanced() -> None:
    cache = make_cache()
    publish(cache, "abcdefghijkl")
    leases = [lease_text(cache, "abcdefghijklXX"), lease_text(cache, "abcdefghijkX")]
    publish(cache, "abcdXXXX")
    cache.check()
    assert cache.num_pinned_blocks == 3
    for lease in leases:
        lease.close()
        cache.check()
    assert cache.num_pinned_blocks == 0
    assert_all_free(cache)


def test_a_leaf_that_grows_under_a_lease_stays_pinned_as_a_whole() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    lease = lease_text(cache, "abcdXX")
    publish(cache, "abcdefghijkl")
    cache.check()
    assert cache.num_pinned_blocks == 3
    lease.close()
    cache.check()
    assert (cache.num_pinned_blocks, cache.num_evictable_blocks) == (0, 3)


def test_an_abandoned_lease_leaves_nothing_reachable() -> None:
    cache = make_cache()
    block_ids = publish(cache, "abcdef")
    before = state(cache)
    lease_text(cache, "abcdefghij").close()
    cache.check()
    assert state(cache)[:-1] == before[:-1], "apart from the nodes, whose time of use has changed"
    assert cached(cache, "abcdefghij") == 6
    assert cache.match(MODEL, spell("abcdefghij")).block_ids.tolist() == block_ids


def test_a_lease_evicts_only_the_blocks_that_it_lacks() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefghijkl")
    with lease_text(cache, "XXXXYYYY"):
        assert cache.num_evicted_blocks == 1
        assert cached(cache, "abcdefghijkl") == 8
    with lease_text(cache, "XXXXYYYY"):
        assert cache.num_evicted_blocks == 1


def test_matched_blocks_are_never_evicted_by_their_own_lease() -> None:
    cache = make_cache(num_blocks=4)
    block_ids = publish(cache, "abcdefgh")
    cache._clock.now_s = 1  # type: ignore[attr-defined]
    publish(cache, "XXXXYYYY")
    with lease_text(cache, "abcdefghijkl") as lease:  # the matched leaf is the older one
        assert lease.cached_tokens == 8
        assert lease.block_ids[:2].tolist() == block_ids
        assert cached(cache, "abcdefgh") == 8
        assert cached(cache, "XXXXYYYY") == 4


def test_a_failed_lease_changes_neither_counts_nor_order() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefgh")
    held = lease_text(cache, "XXXX")
    cache._clock.now_s = 5  # type: ignore[attr-defined]
    before = state(cache)
    for prompt in ("abcdefghijklmnop", "YYYYYYYYYYYYY"):
        with pytest.raises(OutOfBlocks):
            lease_text(cache, prompt)
        assert state(cache) == before
    cache.check()
    held.close()


def test_out_of_blocks_does_not_reveal_what_other_tenants_use() -> None:
    messages = set()
    for cached_text, held_text in (("", "XX"), ("abcd", "XX"), ("", "XXXXXXXXXXX")):
        cache = make_cache(num_blocks=4)
        if cached_text:
            publish(cache, cached_text)
        held = lease_text(cache, held_text)
        with pytest.raises(OutOfBlocks) as caught:
            lease_text(cache, "YYYYYYYYYYYYY")
        messages.add(str(caught.value))
        held.close()
    assert messages == {
        "blocks: expected enough of the pool's 4 for this request, got too few; running requests, held leases, public "
        "prefixes and floors have the others"
    }


def test_blocks_of_its_path_that_a_lease_does_not_reuse_can_be_evicted_for_it() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefghijkl")
    with lease_text(cache, "ZZ"), lease_text(cache, "abcdXXXX") as lease:
        cache.check()
        assert lease.cached_tokens == 4
        assert cached(cache, "abcdefghijkl") == 8


def test_a_path_is_cut_right_below_what_is_reused() -> None:
    cache = make_cache(num_blocks=5)
    publish(cache, "abcdefghijklmnop")
    with lease_text(cache, "ZZ"), lease_text(cache, "abcdXXXXYYYYZZZZ") as lease:
        cache.check()
        assert lease.cached_tokens == 4
        assert cached(cache, "abcdefghijklmnop") == 4


def test_a_shared_block_is_kept_if_evicting_beyond_it_is_enough() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefghijkl")
    with lease_text(cache, "ZZ"), lease_text(cache, "abXX") as lease:
        cache.check()
        assert lease.cached_tokens == 2
        assert lease.copy is not None
        assert cached(cache, "abcdefghijkl") == 8


def test_the_last_block_of_a_full_pool_is_computed_again_rather_than_copied() -> None:
    cache = make_cache(num_blocks=3)
    block_ids = publish(cache, "abcdefgh")
    with lease_text(cache, "ZZ"):
        with lease_text(cache, "abcdefgX") as lease:
            cache.check()
            assert (lease.cached_tokens, lease.copy) == (4, None)
            assert lease.block_ids.tolist() == block_ids
        assert cached(cache, "abcdefgh") == 4


def test_a_node_matched_only_by_the_last_token_can_be_evicted() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefgh")
    publish(cache, "abcdEFGH")
    with lease_text(cache, "abcdEFGHX"), lease_text(cache, "abcde") as lease:
        cache.check()
        assert lease.cached_tokens == 4
        assert cached(cache, "abcdefgh") == 4
        assert cached(cache, "abcdEFGH") == 8


def test_a_pinned_shared_block_costs_nothing_to_keep() -> None:
    cache = make_cache(num_blocks=4)
    publish(cache, "abcdefgh")
    with lease_text(cache, "abcdefghX"), lease_text(cache, "abcdefgX") as lease:
        cache.check()
        assert lease.cached_tokens == 7


def test_a_pool_too_small_for_a_prompt_stays_too_small() -> None:
    cache = make_cache(num_blocks=2)
    publish(cache, "abcdefgh")
    with pytest.raises(OutOfBlocks):
        lease_text(cache, "abcdefghi")
    assert cached(cache, "abcdefgh") == 8


def test_a_prompt_as_large_as_the_pool_can_always_be_leased_again() -> None:
    cache = make_cache(num_blocks=3)
    for text in ("abcdefghijkl", "abcdefghijkl", "XbcdefghijkX", "abcdefghijkl"):
        assert len(publish(cache, text)) == 3
        assert cached(cache, text) == 12
        cache.check()
    assert_all_free(cache)


def test_check_notices_a_pin_without_a_lease() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    next(cache._trees[MODEL].nodes()).ref_count += 1
    with pytest.raises(InvariantViolation, match="references are miscounted"):
        cache.check()


def test_check_notices_a_pin_that_is_missing() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    lease_text(cache, "abcdX")
    next(cache._trees[MODEL].nodes()).ref_count -= 1
    with pytest.raises(InvariantViolation, match="references are miscounted"):
        cache.check()


def test_check_notices_a_drifted_number_of_pinned_blocks() -> None:
    cache = make_cache()
    cache._pins.num_pinned_blocks += 1
    with pytest.raises(InvariantViolation, match="pinned blocks drifted"):
        cache.check()


def test_check_notices_a_leaf_missing_from_the_eviction_queue() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    cache._queue.discard(next(cache._trees[MODEL].nodes()))
    with pytest.raises(InvariantViolation, match="eviction queue"):
        cache.check()


def test_check_notices_a_lost_tree() -> None:
    cache = make_cache()
    publish(cache, "abcd")
    del cache._trees[MODEL]
    with pytest.raises(InvariantViolation, match="outside every tree"):
        cache.check()


def test_check_detects_a_block_without_an_owner() -> None:
    cache = make_cache()
    cache.pool.acquire(1)
    with pytest.raises(InvariantViolation, match="LEASED blocks"):
        cache.check()
