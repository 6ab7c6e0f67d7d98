from __future__ import annotations

import pytest

from radixkv.cache.block_pool import BlockState
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.errors import CapacityError, InvalidRequest, InvariantViolation, LeaseClosed, OutOfBlocks, QuotaExceeded
from radixkv.namespace import Namespace
from tests.fakes import MODEL, cached, lease_text, publish, spell


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(32, 4)


def counts(cache: PrefixCache) -> tuple[int, int, int, int]:
    """Return the numbers of free, leased, published and pinned blocks."""
    return cache.pool.num_free, cache.pool.num_leased, cache.pool.num_published, cache.num_pinned_blocks


def test_closing_releases_uncommitted_blocks(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdefghij")
    lease.commit(8)
    assert counts(cache) == (29, 1, 2, 2)
    lease.close()
    assert counts(cache) == (30, 0, 2, 0)
    assert cached(cache, "abcdefghij") == 8


class TestHeadroom:
    """A lease is opened only if enough blocks, the headroom, are free or evictable after it."""

    def test_headroom_may_be_all_blocks_that_the_lease_does_not_take(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, "aaaabbbbcccc")
        lease = cache.lease(MODEL, spell("11112222"), num_headroom_blocks=6)
        assert (cache.pool.num_free, cache.num_evictable_blocks) == (3, 3)
        lease.close()
        with pytest.raises(OutOfBlocks, match="got too few"):
            cache.lease(MODEL, spell("11112222"), num_headroom_blocks=7)

    def test_blocks_of_a_long_path_that_the_lease_does_not_reuse_count_as_headroom(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, "aaaabbbbccccddddeeeeffff")
        lease = cache.lease(MODEL, spell("aaaabbbb1111"), num_headroom_blocks=5)
        assert lease.cached_tokens == 8
        assert (cache.pool.num_free, cache.num_evictable_blocks) == (1, 4)
        lease.close()
        before = counts(cache)
        with pytest.raises(OutOfBlocks, match="got too few"):
            cache.lease(MODEL, spell("aaaabbbb1111"), num_headroom_blocks=6)
        assert counts(cache) == before

    def test_a_block_that_could_be_reused_in_part_is_evictable_if_headroom_needs_it(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, "aaaabbbbccccddddeeeeffff")
        assert cache.lease(MODEL, spell("aaaabb11"), num_headroom_blocks=5).cached_tokens == 6
        cache = PrefixCache(8, 4)
        publish(cache, "aaaabbbbccccddddeeeeffff")
        assert cache.lease(MODEL, spell("aaaabb11"), num_headroom_blocks=6).cached_tokens == 4

    def test_the_quota_is_named_only_if_it_leaves_fewer_blocks_than_the_pool(self) -> None:
        cache = PrefixCache(8, 4, quotas={MODEL.tenant: Quota(ceiling_blocks=3)})
        with pytest.raises(OutOfBlocks):
            cache.lease(MODEL, spell("aaaabbbbccccdddd"), num_headroom_blocks=6)
        with pytest.raises(QuotaExceeded):
            cache.lease(MODEL, spell("aaaabbbbccccdddd"), num_headroom_blocks=4)

    def test_blocks_that_floors_protect_are_no_headroom(self) -> None:
        other = Namespace("model", tenant="other")
        cache = PrefixCache(8, 4, quotas={"other": Quota(floor_blocks=4)})
        publish(cache, "aaaabbbbccccdddd", other)
        cache.lease(MODEL, spell("11112222"), num_headroom_blocks=6).close()
        cache.lease(MODEL, spell("1111222233334444"), num_headroom_blocks=4).close()
        with pytest.raises(OutOfBlocks):
            cache.lease(MODEL, spell("11112222333344445555"), num_headroom_blocks=1)


def test_closing_again_does_nothing(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdef")
    other = lease_text(cache, "abcdef")
    lease.close()
    before = counts(cache)
    lease.close()
    assert counts(cache) == before
    assert lease.is_closed
    cache.check()
    other.close()
    assert cache.pool.num_free == 32


def test_a_closed_lease_commits_nothing(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdef")
    lease.close()
    with pytest.raises(LeaseClosed):
        lease.commit(6)
    assert cached(cache, "abcdef") == 0
    cache.check()


def test_a_lease_closes_at_the_end_of_its_with_block(cache: PrefixCache) -> None:
    with lease_text(cache, "abcdef") as lease:
        assert not lease.is_closed
    assert lease.is_closed
    assert cache.pool.num_free == 32


def test_a_lease_closes_when_its_owner_fails_and_the_error_propagates(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdefghij")

    def fail() -> None:
        with lease:
            lease.commit(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert lease.is_closed
    assert cached(cache, "abcdefghij") == 4
    assert cache.pool.num_leased == 0
    cache.check()


def test_nested_leases_close_in_any_order(cache: PrefixCache) -> None:
    publish(cache, "abcdefgh")
    leases = [lease_text(cache, text) for text in ("abcdefgh", "abcdefghij", "abcdXX", "abX")]
    cache.check()
    assert cache.evict(32) == 0
    for index in (1, 3, 0, 2):
        leases[index].close()
        cache.check()
    assert counts(cache) == (30, 0, 2, 0)


def test_committed_blocks_are_not_evicted_while_the_lease_is_open(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdefgh")
    lease.commit(4)
    assert cache.evict(32) == 0
    lease.commit(8)
    assert cache.evict(32) == 0
    assert cached(cache, "abcdefgh") == 8
    lease.close()
    assert cache.evict(32) == 2


def test_a_lease_keeps_its_tail_block_when_a_longer_copy_replaces_it(cache: PrefixCache) -> None:
    lease = lease_text(cache, "abcdef")
    lease.commit(6)
    tail = int(lease.block_ids[1])
    publish(cache, "abcdefgh")
    assert cache.match(MODEL, spell("abcdefgh")).block_ids[1] != tail
    assert cache.pool.states()[tail] == BlockState.LEASED
    cache.check()
    lease.close()
    assert cache.pool.states()[tail] == BlockState.FREE
    cache.check()


class TestAdjacentBlocks:
    """Ids of the blocks of a lease while others allocate blocks, too."""

    def test_a_lease_grows_into_its_room(self, cache: PrefixCache) -> None:
        first = cache.lease(MODEL, spell("abcdef"), num_expected_tokens=14)
        second = cache.lease(MODEL, spell("ghijkl"), num_expected_tokens=14)
        for _ in range(4):
            first.extend(spell("xy"))
            second.extend(spell("xy"))
        assert (first.block_ids.tolist(), second.block_ids.tolist()) == ([0, 1, 2, 3], [5, 6, 7, 8])

    def test_a_lease_that_exceeds_its_expected_tokens_continues_after_the_blocks_of_others(
        self, cache: PrefixCache
    ) -> None:
        first = cache.lease(MODEL, spell("abcd"), num_expected_tokens=8)
        cache.lease(MODEL, spell("ghijkl"))
        for _ in range(4):
            first.extend(spell("mnop"))
        assert first.block_ids.tolist() == [0, 1, 2, 5, 6]

    def test_a_suffix_comes_right_after_the_reused_blocks(self, cache: PrefixCache) -> None:
        publish(cache, "abcdefgh")
        publish(cache, "12345678")
        cache.evict(2)
        assert cache.lease(MODEL, spell("12345678wxyz")).block_ids.tolist() == [2, 3, 4]


class TestReserve:
    def test_reserved_blocks_are_used_by_later_tokens(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcd")
        lease.reserve(9)
        assert (lease.num_tokens, lease.block_ids.size, counts(cache)) == (4, 3, (29, 3, 0, 0))
        before = lease.block_ids.tolist()
        lease.extend(spell("efghi"))
        assert lease.block_ids.tolist() == before
        lease.commit(9)
        assert cached(cache, "abcdefghi") == 9
        cache.check()

    def test_blocks_that_a_lease_has_are_not_reserved_again(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcdef")
        lease.commit(6)
        before = lease.block_ids.tolist(), counts(cache)
        for num_tokens in (1, 6):
            lease.reserve(num_tokens)
        assert (lease.block_ids.tolist(), counts(cache), lease.copy) == (*before, None)
        lease.reserve(9)
        before = lease.block_ids.tolist(), counts(cache)
        lease.reserve(8)
        assert (lease.block_ids.tolist(), counts(cache)) == before

    def test_reserved_blocks_without_tokens_are_released(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcdef")
        lease.reserve(12)
        lease.commit(6)
        assert counts(cache) == (29, 1, 2, 2)
        lease.close()
        assert counts(cache) == (30, 0, 2, 0)
        cache.check()

    @pytest.mark.parametrize("num_tokens", [7, 9, 13])
    def test_a_partly_filled_published_block_is_copied_into_a_reserved_block(
        self, cache: PrefixCache, num_tokens: int
    ) -> None:
        lease = lease_text(cache, "abcdef")
        lease.reserve(num_tokens)
        lease.commit(6)
        published = lease.block_ids[:2].tolist()
        lease.extend(spell("g"))
        assert lease.copy == (published[1], lease.block_ids[1])
        assert lease.block_ids.tolist().count(published[1]) == 0
        assert cache.pool.states()[lease.block_ids[1]] == BlockState.LEASED
        lease.copy = None
        lease.commit(7)
        assert cached(cache, "abcdefg") == 7
        lease.close()
        cache.check()
        assert cache.pool.num_leased == 0

    def test_without_blocks_nothing_changes(self) -> None:
        cache = PrefixCache(2, 4)
        lease = lease_text(cache, "abcdefgh")
        before = lease.block_ids.tolist(), counts(cache)
        with pytest.raises(OutOfBlocks, match="enough of the pool's 2 for this request"):
            lease.reserve(9)
        assert (lease.block_ids.tolist(), counts(cache)) == before

    def test_a_closed_lease_reserves_nothing(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcd")
        lease.close()
        with pytest.raises(LeaseClosed):
            lease.reserve(9)


class TestReleaseLast:
    def test_the_last_blocks_are_released_and_others_are_allocated_in_their_place(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcdefghijkl")
        lease.commit(4)
        before = counts(cache)
        first, *_ = lease.block_ids.tolist()
        lease.release_last(2)
        assert lease.block_ids.tolist() == [first]
        assert counts(cache) == (31, 0, 1, 1)
        cache.check()
        lease.reserve(8)
        assert lease.block_ids.size == 2
        lease.reserve(12)
        assert counts(cache) == before
        assert lease.commit(12) == 8
        lease.close()
        assert cached(cache, "abcdefghijklm") == 12
        cache.check()

    def test_without_free_blocks_no_others_are_allocated(self) -> None:
        cache = PrefixCache(2, 4)
        lease = lease_text(cache, "abcdefgh")
        lease.release_last(1)
        with lease_text(cache, "wxyz"), pytest.raises(OutOfBlocks):
            lease.reserve(8)
        lease.reserve(8)
        assert lease.block_ids.size == 2

    def test_a_closed_lease_releases_nothing(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcd")
        lease.close()
        with pytest.raises(LeaseClosed):
            lease.release_last(1)


class TestExtend:
    def test_a_whole_last_block_is_followed_by_a_new_one(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcd")
        lease.commit(4)
        lease.extend(spell("e"))
        assert counts(cache) == (30, 1, 1, 1)
        assert (lease.num_tokens, lease.block_ids.size, lease.copy) == (5, 2, None)

    def test_free_slots_of_the_last_block_are_used_while_it_is_not_published(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "ab")
        before = lease.block_ids.tolist()
        lease.extend(spell("cd"))
        assert lease.block_ids.tolist() == before
        lease.extend(spell("efghi"))
        assert lease.block_ids.size == 3

    def test_a_partly_filled_published_block_is_copied_before_it_is_extended(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcdef")
        lease.commit(6)
        first, second = lease.block_ids.tolist()
        lease.extend(spell("g"))
        assert lease.block_ids[0] == first
        assert lease.copy == (second, lease.block_ids[1])
        assert cache.pool.states()[second] == BlockState.PUBLISHED
        assert cached(cache, "abcdef") == 6, "what was published stays"
        lease.copy = None
        lease.extend(spell("hi"))
        lease.commit(9)
        assert cached(cache, "abcdefghi") == 9
        assert cache.pool.states()[second] == BlockState.LEASED, "leases of this path may still read it"
        lease.close()
        assert cache.pool.states()[second] == BlockState.FREE
        cache.check()

    def test_only_the_longer_copy_stays(self, cache: PrefixCache) -> None:
        with lease_text(cache, "abcdef") as lease:
            lease.commit(6)
            lease.extend(spell("g"))
            lease.commit(7)
        assert counts(cache) == (30, 0, 2, 0)

    def test_without_blocks_nothing_changes(self) -> None:
        cache = PrefixCache(2, 4)
        lease = lease_text(cache, "abcdefgh")
        before = lease.block_ids.tolist(), bytes(lease.tokens), counts(cache)
        with pytest.raises(OutOfBlocks, match="enough of the pool's 2 for this request"):
            lease.extend(spell("i"))
        assert (lease.block_ids.tolist(), lease.tokens, counts(cache)) == before

    def test_beyond_the_ceiling_nothing_changes(self) -> None:
        cache = PrefixCache(9, 4, quotas={"acme": Quota(ceiling_blocks=2)})
        lease = lease_text(cache, "abcdefgh", Namespace("model", "acme"))
        with pytest.raises(QuotaExceeded, match="a ceiling of 2 for this tenant, of which leases hold 2"):
            lease.extend(spell("i"))
        assert lease.num_tokens == 8

    def test_leaves_of_other_prompts_are_evicted(self) -> None:
        cache = PrefixCache(3, 4)
        publish(cache, "wxyz")
        lease = lease_text(cache, "abcdefgh")
        lease.extend(spell("i"))
        assert cached(cache, "wxyz") == 0
        assert cache.num_evicted_blocks == 1

    @pytest.mark.parametrize("tokens", [b"", b"abc"])
    def test_bytes_that_are_not_tokens_are_refused(self, cache: PrefixCache, tokens: bytes) -> None:
        lease = lease_text(cache, "abcd")
        with pytest.raises(InvalidRequest, match=f"expected one or more uint32 token ids, got {len(tokens)} bytes"):
            lease.extend(tokens)

    def test_a_closed_lease_cannot_be_continued(self, cache: PrefixCache) -> None:
        lease = lease_text(cache, "abcd")
        lease.close()
        with pytest.raises(LeaseClosed):
            lease.extend(spell("e"))
        cache.check()


def private_lease(cache: PrefixCache, text: str, num_tokens: int) -> Lease:
    """Open a lease, and reserve private blocks for `num_tokens` tokens."""
    lease = lease_text(cache, text)
    try:
        lease.reserve_private(num_tokens)
    except CapacityError:
        lease.close(is_used=False)
        raise
    return lease


def test_private_blocks_are_reserved_in_addition_to_the_shared_ones() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    publish(cache, "abcdefgh")
    with private_lease(cache, "abcdefghij", 6) as lease:
        cache.check()
        assert (lease.cached_tokens, lease.num_tokens, lease.num_dropped_tokens) == (8, 10, 0)
        assert (lease.block_ids.size, lease.private_block_ids.size) == (3, 2)
        assert lease.commit(10) == 2
        assert cache.pool.num_leased == 2
    cache.check()
    assert (cache.pool.num_leased, cache.num_pinned_blocks) == (0, 0)


def test_a_lease_publishes_nothing_after_it_has_left_the_shared_blocks() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    with private_lease(cache, "abcdefghij", 6) as lease:
        lease.commit(10)
        lease.leave_shared(num_dropped_tokens=5)
        cache.check()
        assert cache.num_pinned_blocks == 0
        lease.extend(spell("kl"))
        assert lease.commit(12) == 0
        assert (lease.num_tokens, bytes(lease.tokens)) == (12, spell("abcdefghijkl"))
        assert lease.block_ids.tolist() == lease.private_block_ids.tolist()
        lease.num_dropped_tokens += 1
        assert lease.num_dropped_tokens == 6
        cache.check()
    cache.check()
    assert cached(cache, "abcdefghijkl") == 10
    assert cache.pool.num_leased == 0


def test_a_lease_with_private_blocks_cannot_be_held() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    with private_lease(cache, "abcd", 6) as lease, pytest.raises(InvariantViolation):
        lease.hold()


def test_a_lease_without_room_for_private_blocks_is_closed_as_unused() -> None:
    cache = PrefixCache(num_blocks=5, block_size=4)
    with pytest.raises(OutOfBlocks):
        private_lease(cache, "abcdefgh", 16)
    cache.check()
    assert cache.pool.num_leased == 0


def test_private_blocks_count_for_the_ceiling() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4, quotas={MODEL.tenant: Quota(ceiling_blocks=3)})
    with private_lease(cache, "abcdefgh", 4):
        cache.check()
    publish(cache, "abcd")
    usage = cache.tenants[MODEL.tenant]
    before = usage.num_hit_tokens, usage.num_miss_tokens
    with pytest.raises(QuotaExceeded):
        private_lease(cache, "abcdefgh", 5)
    cache.check()
    assert (usage.num_hit_tokens, usage.num_miss_tokens) == before
    assert cache.pool.num_leased == 0


def test_a_purge_revokes_a_private_lease() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    with private_lease(cache, "abcdefgh", 4) as lease:
        lease.leave_shared(num_dropped_tokens=4)
        cache.purge(tenant=MODEL.tenant)
        assert lease.is_revoked
    cache.check()


def test_an_unused_lease_counts_neither_as_hit_nor_as_miss_with_or_without_a_public_prefix() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    prefix = cache.public.register("p", "model", "", spell("abcdefgh"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(8)
        cache.public.activate(prefix)
    publish(cache, "abcdefghijkl")
    publish(cache, "stuvwx")
    usage = cache.tenants[MODEL.tenant]
    before = usage.num_hit_tokens, usage.num_miss_tokens
    for text, cached_tokens in (("stuvwxyz", 6), ("abcdefghijklmn", 12)):
        unused = lease_text(cache, text)
        assert unused.cached_tokens == cached_tokens
        unused.close(is_used=False)
        assert (usage.num_hit_tokens, usage.num_miss_tokens) == before
    assert unused.root_prefix.tokens == prefix.tokens
    assert cache.pool.num_leased == 0
    cache.check()
