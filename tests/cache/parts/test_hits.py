"""Hits, leases and misses of a cache whose blocks have parts."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.cache.parts.part_groups import PartGroups
from radixkv.cache.parts.part_pool import PartPool
from radixkv.cache.parts.reach import Reach
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.prompt_lease import PromptLease
from radixkv.errors import OutOfBlocks
from radixkv.namespace import PUBLIC_TENANT
from tests.fakes import MODEL, spell

WINDOW = 7  # a hit of n tokens needs the 6 before
ALPHABET = "abcdefghijklmnopqrstuvwx"


def cache_of(num_blocks: int = 32, num_parts: int = 14) -> PrefixCache:
    pool = PartPool(num_blocks, num_parts, block_size=4, reach=Reach.of_window(WINDOW), step_tokens=8)
    return PrefixCache(num_blocks, 4, parts=PartGroups([pool]))


def compute(lease: PromptLease, upto: int | None = None) -> None:
    """Compute and publish in steps of eight tokens."""
    upto, start = upto or lease.num_tokens, lease.committed_tokens
    (holder,) = lease.own.parts
    while start < upto:
        end = min(upto, start + 8)
        holder.cover(lease.block_ids, start, end, lease.copy)
        lease.copy = None
        holder.settle(end)
        lease.commit(end)
        start = end


def publish(cache: PrefixCache, text: str) -> list[int]:
    with cache.lease(MODEL, spell(text)) as lease:
        compute(lease)
        return lease.block_ids.tolist()


def give_up(cache: PrefixCache, *block_ids: int) -> None:
    cache.parts.freed(np.array(block_ids, dtype=np.int32))


def found(cache: PrefixCache, text: str) -> int:
    return cache.match(MODEL, spell(text)).cached_tokens


def test_a_hit_needs_only_what_is_within_reach_of_its_end() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    give_up(cache, *blocks[:4])
    assert found(cache, ALPHABET + "!") == 24
    assert found(cache, ALPHABET) == 23
    assert found(cache, ALPHABET[:22] + "!") == 22, "sixteen to twenty-two, in the last two blocks"
    assert found(cache, ALPHABET[:21] + "!") == 0, "fifteen is in a block whose part is gone"


def test_a_hit_is_the_longest_one_whose_parts_are_there() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    give_up(cache, blocks[3])
    assert found(cache, ALPHABET[:20] + "!") == 12
    with cache.lease(MODEL, spell(ALPHABET[:20] + "!")) as lease:
        assert (lease.cached_tokens, lease.copy) == (12, None)
        assert lease.block_ids[:3].tolist() == blocks[:3]
        compute(lease)
        cache.check()
    assert found(cache, ALPHABET[:20] + "!") == 20, "what was computed again gave the missing part to the tree's block"
    assert cache.parts.pools[0].table[blocks[3]] >= 0


def test_a_miss_for_a_missing_part_is_told_as_evicted() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    give_up(cache, blocks[3])
    prompt = spell(ALPHABET[:20] + "!")
    assert cache.explain(MODEL, prompt, 12) is MissReason.EVICTED
    assert cache.explain(MODEL, spell("abc!"), 3) is MissReason.NONE
    assert cache.explain(MODEL, spell("abc!!"), 3) is MissReason.DIVERGED


def test_what_a_lease_found_stays_until_it_is_closed() -> None:
    cache = cache_of(num_parts=11)
    publish(cache, ALPHABET)
    with cache.lease(MODEL, spell(ALPHABET + "!")) as lease:
        assert lease.cached_tokens == 24
        with pytest.raises(OutOfBlocks, match="parts of windowed layers: expected room for 5 blocks more, got 4 of 11"):
            cache.lease(MODEL, spell("0" * 100))
        cache.check()
    other = cache.lease(MODEL, spell("0" * 100))
    compute(other)
    other.close()
    assert found(cache, ALPHABET + "!") == 24, "those that a request passed go before those where one ended"
    cache.check()


def test_less_of_a_prompt_has_other_parts_within_reach() -> None:
    """In a full cache the block that is shared in part is given up, and so is what can't be used without it."""
    cache = cache_of(num_blocks=6)
    blocks = publish(cache, ALPHABET)
    give_up(cache, *blocks[2:4])
    prompt = spell(ALPHABET[:22] + "!!")
    assert cache.match(MODEL, prompt).cached_tokens == 22
    with cache.lease(MODEL, prompt) as lease:
        assert (lease.cached_tokens, lease.copy) == (8, None)
        assert lease.block_ids[:2].tolist() == blocks[:2]
        cache.check()


def test_a_held_lease_keeps_what_its_prompt_needs_to_be_found() -> None:
    cache = cache_of(num_parts=14)
    lease = cache.lease(MODEL, spell(ALPHABET))
    compute(lease)
    lease.keep()
    cache.check()
    pool = cache.parts.pools[0]
    assert (pool.num_lasting, pool.num_reserved, pool.num_needed) == (2, 2, 2)
    for text in "0123":
        publish(cache, text * 60)
    assert found(cache, ALPHABET) == 23
    lease.close()
    assert (pool.num_lasting, pool.num_reserved, pool.num_needed) == (0, 0, 0)


def test_held_leases_leave_a_request_its_parts() -> None:
    cache = cache_of(num_parts=14)
    leases = [cache.lease(MODEL, spell(text * 20)) for text in "a"]
    for text in "bcd":
        compute(leases[-1])
        leases[-1].keep()
        leases.append(cache.lease(MODEL, spell(text * 20)))
    pool = cache.parts.pools[0]
    assert pool.max_lasting == 3
    assert pool.num_lasting == 2, "one lease's"
    publish(cache, ALPHABET)
    cache.check()


def test_a_public_prefix_keeps_all_its_parts() -> None:
    cache = cache_of(num_blocks=64, num_parts=60)
    prefix = cache.public.register("system", "model", "", spell(ALPHABET))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        compute(lease)
    cache.public.keep(prefix)
    cache.check()
    for text in "0123456":
        publish(cache, text * 60)
    assert prefix.namespace.tenant == PUBLIC_TENANT
    assert found(cache, ALPHABET[:9] + "!") == 9, "wherever a prompt leaves it"
    with cache.lease(MODEL, spell(ALPHABET[:9] + "!" * 9)) as lease:
        compute(lease)
        cache.check()
    assert found(cache, ALPHABET[:9] + "!" * 12) == 18
    cache.public.unregister("system")
    cache.check()
    assert cache.parts.pools[0].num_lasting == 0


def test_a_public_prefix_for_which_there_are_too_few_parts_is_refused() -> None:
    cache = cache_of(num_blocks=64, num_parts=14)
    with pytest.raises(OutOfBlocks, match="expected at most 3 that outlive their requests, got 7 beside 0"):
        cache.public.register("system", "model", "", spell(ALPHABET))


def test_hits_that_lack_parts_are_counted_with_what_they_leave_out() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    give_up(cache, *blocks[2:4])
    with cache.lease(MODEL, spell(ALPHABET[:14] + "!")) as lease:
        assert lease.cached_tokens == 8
    with cache.lease(MODEL, spell(ALPHABET + "!")), cache.lease(MODEL, spell(ALPHABET[:14] + "!"), is_resumed=True):
        pass
    stats = cache.parts.stats()
    assert stats is not None
    assert (stats.shortened_hits, stats.lost_tokens) == (1, 6)


def test_parts_are_counted_by_who_has_them() -> None:
    cache = cache_of()
    publish(cache, ALPHABET)
    with cache.lease(MODEL, spell(ALPHABET + "!")) as lease:
        (holder,) = lease.own.parts
        (pool,) = cache.parts.pools
        stats = cache.parts.stats()
        assert stats is not None
        assert (stats.needed, stats.kept, stats.free) == (len(holder.needed), 6 - len(holder.needed), 8)
        assert stats.given_up == pool.num_given_up == 0


def test_a_cache_without_parts_counts_none() -> None:
    assert PrefixCache(8, 4).parts.stats() is None


def test_a_branch_is_found_once_two_prompts_have_parted_there() -> None:
    cache = cache_of(num_blocks=200, num_parts=16)
    for number, cached_tokens in ("1", 0), ("2", 0), ("3", 16), ("4", 16):
        text = ALPHABET[:16] + number * 60  # more blocks than there are parts
        with cache.lease(MODEL, spell(text)) as lease:
            assert lease.cached_tokens == cached_tokens
            assert lease.found_tokens == (0 if number == "1" else 16)
            compute(lease)
    cache.check()
