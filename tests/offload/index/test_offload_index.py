"""Evicted blocks are queued with their keys, found after cached ones, and forgotten with their namespace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant, Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import NO_PART
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock, StoredBlock
from radixkv.offload.index.tier_index import TierIndex, TierShares
from radixkv.tokens import TOKEN_BYTES
from tests.fake_runner import tokens
from tests.fakes import FakeClock

from ..tiered_bench import PROMPT, TieredBench, compute_and_evict_prompt

BLOCK_SIZE = 4
BLOCK_BYTES = TOKEN_BYTES * BLOCK_SIZE
ACME = Namespace("model", "acme")
OTHER = Namespace("model", "other")


def key_blocks(namespace: Namespace, prompt: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
    """Yield the blocks of a prompt, with readable keys: the tenant, and all tokens up to the end of the block."""
    parent = namespace.tenant.encode() if parent is None else parent
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block_tokens = prompt[start : start + BLOCK_BYTES]
        key = parent + block_tokens
        yield KeyedBlock(key, parent, block_tokens, namespace)
        parent = key


class Cached:
    """A cache with blocks of four tokens, and the index of the blocks that tiers hold.

    Attributes:
        parts: the part of windowed layers that each block on the device has, by block id.
    """

    def __init__(self, *tier_indexes: TierIndex, num_blocks: int = 4, clock: FakeClock | None = None) -> None:
        self.parts: dict[int, int] = {}
        self.index = OffloadIndex(tier_indexes or [TierIndex("host", 100)], key_blocks, BLOCK_SIZE, self.parts.get)
        self.cache = PrefixCache(
            num_blocks, BLOCK_SIZE, listeners=[self.index], clock=clock or FakeClock(), max_retained_blocks=num_blocks
        )
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)

    def put(self, ids: range, namespace: Namespace = ACME) -> None:
        with self.cache.lease(namespace, tokens(ids)) as lease:
            lease.commit(len(ids))

    def take_evicted(self) -> list[tuple[int, bytes]]:
        """Return the block ids and tokens of the blocks that were evicted since the last call."""
        evicted_blocks, _ = self.index.take_evicted_blocks()
        return [(each.block_id, each.block.tokens) for each in evicted_blocks]

    def find(self, ids: range, num_cached_blocks: int = 0, namespace: Namespace = ACME) -> list[StoredBlock]:
        """Report that the tiers have stored all their blocks, and look up a prompt after its cached blocks."""
        for name, tier_index in self.index.tiers.items():
            self.index.stored(name, list(tier_index))
        return self.index.find(namespace, tokens(ids), num_cached_blocks)


def test_evicted_blocks_are_queued_the_last_one_first() -> None:
    cached = Cached()
    cached.put(range(12))
    block_ids = cached.cache.match(ACME, tokens(range(13))).block_ids.tolist()
    cached.cache.evict(2)
    assert cached.take_evicted() == [(block_ids[2], tokens(range(8, 12))), (block_ids[1], tokens(range(4, 8)))]
    assert cached.take_evicted() == []


def test_a_block_that_is_filled_in_part_is_not_stored() -> None:
    cached = Cached()
    cached.put(range(10))
    cached.cache.evict(4)
    assert [block_tokens for _, block_tokens in cached.take_evicted()] == [tokens(range(4, 8)), tokens(range(4))]


def test_stored_blocks_are_found_behind_the_cached_ones_up_to_a_gap() -> None:
    cached = Cached()
    cached.put(range(16))
    cached.cache.evict(3)
    assert cached.cache.match(ACME, tokens(range(17))).cached_tokens == 4
    found = cached.find(range(17), 1)
    assert [each.block.tokens for each in found] == [tokens(range(4, 8)), tokens(range(8, 12)), tokens(range(12, 16))]
    assert {each.tier for each in found} == {"host"}
    cached.index.lost("host", [found[1].block.key])
    assert len(cached.find(range(17), 1)) == 1


def test_blocks_that_are_not_stored_yet_are_not_found() -> None:
    cached = Cached()
    cached.put(range(8))
    cached.cache.evict(2)
    assert cached.index.find(ACME, tokens(range(9)), 0) == []
    assert len(cached.find(range(9))) == 2


def test_the_last_token_is_always_computed() -> None:
    cached = Cached()
    cached.put(range(8))
    cached.cache.evict(2)
    assert len(cached.find(range(8))) == 1
    assert len(cached.find(range(9))) == 2


def test_another_tenant_finds_nothing() -> None:
    cached = Cached()
    cached.put(range(8))
    cached.cache.evict(2)
    assert cached.find(range(9), namespace=OTHER) == []


def test_stored_blocks_are_not_stored_again() -> None:
    cached = Cached()
    cached.put(range(8))
    cached.cache.evict(2)
    assert len(cached.take_evicted()) == 2
    cached.put(range(8))
    cached.cache.evict(2)
    assert cached.take_evicted() == []


def test_each_tier_gets_the_blocks_that_it_does_not_hold() -> None:
    small = TierIndex("host", 1)
    large = TierIndex("disk", 100)
    cached = Cached(small, large)
    cached.put(range(8))
    cached.cache.evict(2)
    evicted_blocks, victims = cached.index.take_evicted_blocks()
    assert [list(each.tiers) for each in evicted_blocks] == [["host", "disk"], ["host", "disk"]]
    assert victims == {"host": [evicted_blocks[0].block.key], "disk": []}
    assert [each.tier for each in cached.find(range(9))] == ["host", "disk"]


def test_loaded_blocks_are_evicted_first_from_the_end_of_a_prompt() -> None:
    tier_index = TierIndex("host", 3)
    cached = Cached(tier_index)
    cached.put(range(8))
    cached.cache.evict(2)
    keys = [each.block.key for each in cached.find(range(9))]
    cached.index.loaded(keys)
    assert list(tier_index) == [keys[1], keys[0]]


def test_a_purge_forgets_stored_and_queued_blocks() -> None:
    cached = Cached(num_blocks=8)
    cached.put(range(8))
    cached.put(range(8), OTHER)
    cached.cache.evict(4)
    keys = [each.block.key for each in cached.find(range(9))]
    purged_keys = cached.index.purge("acme", None, None)
    assert {tier: sorted(tier_keys) for tier, tier_keys in purged_keys.items()} == {"host": keys}
    assert cached.find(range(9)) == []
    assert len(cached.find(range(9), namespace=OTHER)) == 2
    assert len(cached.take_evicted()) == 2


@pytest.mark.parametrize("names", [("acme", "x", None), ("acme", None, "x"), ("unknown", None, None), (None, "x", "")])
def test_a_purge_of_other_namespaces_forgets_nothing(names: tuple[str | None, str | None, str | None]) -> None:
    cached = Cached()
    cached.put(range(8))
    cached.cache.evict(2)
    assert cached.index.purge(*names) == {"host": []}
    assert len(cached.find(range(9))) == 2


def test_blocks_below_a_public_prefix_are_found_by_the_whole_prompt() -> None:
    cached = Cached(num_blocks=8)
    prefix = cached.cache.public.register("system", "model", "", tokens(range(8)))
    with cached.cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(8)
    cached.cache.public.activate(prefix)
    cached.put(range(16))
    assert cached.cache.evict(8) == 2  # blocks of a public prefix are not evicted
    evicted_tokens = [block_tokens for _, block_tokens in cached.take_evicted()]
    assert evicted_tokens == [tokens(range(12, 16)), tokens(range(8, 12))]
    found = cached.find(range(17), 2)
    assert [each.block.namespace for each in found] == [ACME, ACME]
    assert [each.block.tokens for each in found] == [tokens(range(8, 12)), tokens(range(12, 16))]


def test_blocks_below_an_unregistered_prefix_are_not_stored() -> None:
    cached = Cached(num_blocks=8)
    prefix = cached.cache.public.register("system", "model", "", tokens(range(8)))
    with cached.cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(8)
    cached.cache.public.activate(prefix)
    cached.put(range(16))
    cached.cache.public.unregister("system")
    cached.cache.evict(8)
    assert cached.take_evicted() == []
    assert cached.index.is_empty


def test_public_blocks_are_not_stored() -> None:
    cached = Cached()
    with cached.cache.lease(Namespace("model", PUBLIC_TENANT, salt="1"), tokens(range(8))) as lease:
        lease.commit(8)
    cached.cache.evict(2)
    assert cached.take_evicted() == []


def test_without_tiers_nothing_is_queued() -> None:
    offload_index = OffloadIndex([], key_blocks, BLOCK_SIZE)
    cache = PrefixCache(4, BLOCK_SIZE, listeners=[offload_index])
    with cache.lease(ACME, tokens(range(8))) as lease:
        lease.commit(8)
    cache.evict(2)
    assert offload_index.take_evicted_blocks() == ([], {})
    assert cache.explain(ACME, tokens(range(8)), 0) is MissReason.EVICTED


def test_retained_blocks_and_those_before_them_are_retained_in_tiers() -> None:
    tier_index = TierIndex("host", 4)
    cached = Cached(tier_index, num_blocks=8)
    cached.put(range(12))
    cached.cache.retain(ACME, tokens(range(12)), Retention(90, start=4, end=8))
    cached.cache.evict(3)
    cached.put(range(100, 112))
    cached.cache.evict(3)
    assert [key[-16:] for key in tier_index][-2:] == [tokens(range(4, 8)), tokens(range(4))]
    assert [each.block.tokens for each in cached.find(range(12))] == [tokens(range(4)), tokens(range(4, 8))]


def test_loaded_blocks_keep_their_priority_for_the_next_eviction() -> None:
    tier_index = TierIndex("host", 2)
    cached = Cached(tier_index)
    cached.put(range(4))
    cached.cache.retain(ACME, tokens(range(4)), Retention(90))
    cached.cache.evict(1)
    cached.index.loaded(list(tier_index))
    cached.put(range(4))
    cached.cache.evict(1)
    cached.put(range(100, 112))
    cached.cache.evict(3)
    assert [each.block.tokens for each in cached.find(range(5))] == [tokens(range(4))]


def test_a_priority_that_expired_on_the_device_is_not_set_in_tiers() -> None:
    tier_index = TierIndex("host", 4)
    clock = FakeClock()
    cached = Cached(tier_index, clock=clock)
    cached.put(range(4))
    cached.cache.retain(ACME, tokens(range(4)), Retention(90, ttl_s=10.0))
    clock.now_s += 11.0
    cached.cache.evict(1)
    assert tier_index.priority_of(next(iter(tier_index))) == 50


def test_a_block_that_no_tier_has_room_for_is_not_stored() -> None:
    tier_index = TierIndex("host", 2, shares_of=lambda tenant: TierShares(floor=1.0 if tenant == "acme" else 0.0))
    cached = Cached(tier_index)
    cached.put(range(8))
    cached.cache.evict(2)
    cached.take_evicted()
    cached.put(range(100, 108), OTHER)
    cached.cache.evict(2)
    assert cached.take_evicted() == []


def test_a_purge_forgets_retained_blocks() -> None:
    tier_index = TierIndex("host", 4)
    cached = Cached(tier_index)
    for namespace in (ACME, OTHER):
        cached.put(range(4), namespace)
        cached.cache.retain(namespace, tokens(range(4)), Retention(90))
        cached.cache.evict(1)
    cached.index.purge("acme", None, None)
    cached.cache.purge(tenant="acme")
    cached.put(range(4))
    cached.cache.evict(1)
    assert {tier_index.owned[key].tenant: tier_index.priority_of(key) for key in tier_index} == {
        "acme": 50,
        "other": 90,
    }


def test_queue_returns_keys_and_note_evicted_moves_blocks_to_the_end() -> None:
    cached = Cached(num_blocks=8)
    cached.put(range(14))
    cached.put(range(100, 108))
    cached.cache.evict(2)  # the last two blocks of the first prompt, one of which is incomplete
    (node,) = (node for node in cached.cache.nodes() if node.tokens.startswith(tokens(range(100, 104))))
    keys = cached.index.queue(node, 0, node.num_blocks, ["host"])
    assert keys == [b"acme" + tokens(range(100, end)) for end in (104, 108)]
    tier_index = cached.index.tiers["host"]
    (first_prompt_key,) = set(tier_index) - set(keys)
    assert list(tier_index) == [first_prompt_key, *reversed(keys)]
    cached.index.note_evicted("host", [first_prompt_key, b"not there"])
    assert list(tier_index) == [*reversed(keys), first_prompt_key]


def evict_with(cached: Cached, *parts: int) -> list[tuple[int | None, bytes]]:
    """Evict a prompt of two blocks that have these parts. Returns the parts and tokens of the evicted blocks."""
    cached.put(range(8))
    block_ids = cached.cache.match(ACME, tokens(range(9))).block_ids.tolist()
    cached.parts.update(zip(block_ids, parts, strict=True))
    cached.cache.evict(2)
    evicted_blocks, _ = cached.index.take_evicted_blocks()
    return [(each.part_id, each.block.tokens) for each in evicted_blocks]


def test_a_block_is_evicted_with_its_part_or_without() -> None:
    cached = Cached()
    assert evict_with(cached, 7, NO_PART) == [(None, tokens(range(4, 8))), (7, tokens(range(4)))]
    assert [each.has_part for each in cached.find(range(9))] == [True, False]


def test_a_block_that_is_stored_without_its_part_is_stored_again_with_it() -> None:
    cached = Cached()
    evict_with(cached, NO_PART, NO_PART)
    cached.find(range(9))
    assert evict_with(cached, NO_PART, 3) == [(3, tokens(range(4, 8)))]
    assert len(cached.index.find(ACME, tokens(range(9)), 0)) == 1, "the second block is being saved again"
    assert [each.has_part for each in cached.find(range(9))] == [False, True]
    assert evict_with(cached, NO_PART, 3) == []


def test_a_block_that_was_loaded_without_its_part_is_known_to_lack_it() -> None:
    cached = Cached()
    evict_with(cached, 1, 2)
    _, second = cached.find(range(9))
    cached.index.note_partless("host", [second.block.key, b"gone"])
    assert [each.has_part for each in cached.find(range(9))] == [True, False]
    cached.index.lost("host", [second.block.key])
    assert cached.index.tiers["host"].partless == set()


def test_a_victim_that_is_evicted_again_is_rewritten_if_it_has_a_part_now() -> None:
    cached = Cached(TierIndex("host", 1))
    cached.put(range(4))
    cached.parts.update(dict.fromkeys(range(4), NO_PART))
    cached.cache.evict(1)
    cached.index.take_evicted_blocks()
    cached.put(range(10, 14))
    cached.cache.evict(1)
    cached.put(range(4))
    cached.parts.update(dict.fromkeys(range(4), 5))
    cached.cache.evict(1)
    evicted_blocks, victims = cached.index.take_evicted_blocks()
    assert [(each.part_id, each.block.tokens) for each in evicted_blocks][-1] == (5, tokens(range(4)))
    assert evicted_blocks[-1].block.key not in victims["host"]


NAMESPACE = Namespace("fake")


def test_a_prompt_is_retained_on_the_device_and_in_stores() -> None:
    bench = TieredBench(num_blocks=6, host=8)
    bench.prefill(PROMPT)
    bench.evict(3)  # of four blocks
    grant = bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90, start=2, end=10)).grant
    assert grant == Grant(8, 0, 0), "two tokens on the device, six in two stored blocks"
    grant = bench.core.retain(NAMESPACE, tokens(range(4)), Retention(90)).grant
    assert grant == Grant(4, 0, 0)


def test_the_grant_counts_tokens_that_are_not_retained_in_tiers() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=8, retained_share=0.25))
    grant = bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90)).grant
    assert grant == Grant(8, 4, 1), "two blocks are retained, one is not, and the last token is not stored"


def test_blocks_in_shared_stores_can_not_be_retained() -> None:
    bench = compute_and_evict_prompt(TieredBench(redis=100))
    assert bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90)).grant == Grant(0, 0, 13)
