import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.private.private_lease import PrivateLease, with_private_blocks
from radixkv.cache.tenants import Quota
from radixkv.errors import InvariantViolation, OutOfBlocks, QuotaExceeded
from tests.fakes import MODEL, cached, lease_text, publish, spell


def private_lease(cache: PrefixCache, text: str, num_tokens: int) -> PrivateLease:
    lease = with_private_blocks(cache.leases, MODEL, lease_text(cache, text), num_tokens)
    assert isinstance(lease, PrivateLease)
    return lease


def test_it_is_the_lease_of_the_prompt_until_the_shared_blocks_are_left() -> None:
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


def test_nothing_is_published_once_the_shared_blocks_are_left() -> None:
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
        lease.drop_token()
        assert lease.num_dropped_tokens == 6
        cache.check()
    cache.check()
    assert cached(cache, "abcdefghijkl") == 10
    assert cache.pool.num_leased == 0


def test_nobody_may_hold_it() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    with private_lease(cache, "abcd", 6) as lease, pytest.raises(InvariantViolation):
        lease.keep()


def test_prompt_and_private_blocks_are_had_together_or_not_at_all() -> None:
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
    counts = usage.num_hit_tokens, usage.num_miss_tokens
    with pytest.raises(QuotaExceeded):
        private_lease(cache, "abcdefgh", 5)
    cache.check()
    assert (usage.num_hit_tokens, usage.num_miss_tokens) == counts
    assert cache.pool.num_leased == 0


def test_a_purge_revokes_it() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    with private_lease(cache, "abcdefgh", 4) as lease:
        lease.leave_shared(num_dropped_tokens=4)
        cache.purge(tenant=MODEL.tenant)
        assert lease.is_revoked
    cache.check()
