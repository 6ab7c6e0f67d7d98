from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.prompt_lease import close_unused
from radixkv.cache.public.hung_lease import HungLease
from tests.fakes import MODEL, lease_text, publish, spell


def test_a_lease_that_was_not_used_is_neither_hit_nor_miss_below_a_public_prefix_either() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    prefix = cache.public.register("p", "model", "", spell("abcdefgh"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(8)
        cache.public.keep(prefix)
    publish(cache, "abcdefghijkl")
    publish(cache, "stuvwx")
    usage = cache.tenants[MODEL.tenant]
    before = usage.num_hit_tokens, usage.num_miss_tokens
    for text, cached_tokens in (("stuvwxyz", 6), ("abcdefghijklmn", 12)):
        unused = lease_text(cache, text)
        assert unused.cached_tokens == cached_tokens
        close_unused(unused)
        assert (usage.num_hit_tokens, usage.num_miss_tokens) == before
    assert isinstance(unused, HungLease)
    assert cache.pool.num_leased == 0
    cache.check()
