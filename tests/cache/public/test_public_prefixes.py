"""Public prefixes from their registration until their blocks are free."""

from __future__ import annotations

import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks, UnknownPublicPrefix
from tests.fakes import spell

_BLOCK = 4


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(16, _BLOCK, max_public_blocks=4)


def test_a_prefix_takes_its_blocks_until_nobody_computes_it(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefghijkl"))
    lease = cache.lease(prefix.namespace, prefix.tokens)
    lease.commit(8)
    cache.public.unregister("p")
    assert cache.public.num_blocks == 3
    with pytest.raises(OutOfBlocks, match=r"^public prefixes: expected at most 4 blocks"):
        cache.public.register("q", "model", "", spell("abcdefgh"))
    lease.close()
    cache.check()
    cache.public.give_up(prefix)
    assert cache.public.num_blocks == 0
    assert cache.pool.num_free == 16
    cache.check()


def test_a_prefix_that_was_unregistered_is_not_kept(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefghijkl"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(12)
    cache.public.unregister("p")
    with pytest.raises(UnknownPublicPrefix, match=r"^name: expected a registered public prefix"):
        cache.public.keep(prefix)
    assert cache.pool.num_free == 16
    cache.check()


def test_a_prefix_that_can_not_be_computed_is_unregistered(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefgh"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(4)
    cache.public.give_up(prefix)
    assert not list(cache.public)
    assert cache.pool.num_free == 16
    cache.check()
