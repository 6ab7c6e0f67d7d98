"""Keys of blocks in trees equal those of their prompts, and long prompts are not hashed again for each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node, path_to
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.invocation import InvocationMarks
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys, PromptKeys
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex
from radixkv.tokens import TOKEN_BYTES
from tests.cache.walk.collision_walk import WRONG, CollisionWalk
from tests.fake_runner import tokens
from tests.fakes import FakeClock

BLOCK = 4
KEYS = BlockKeys(BlockFormat("model", "float32", "fp32", "by block", BLOCK, 64, "cpu"), b"secret")
ACME = Namespace("model", "acme")
LONG = 200  # blocks


class CheckedIndex(OffloadIndex):
    """Compares all keys that it makes with those that are computed from the start of the prompt."""

    def queue(self, node: Node, start: int, end: int, tier_names: Iterable[str]) -> list[bytes]:
        num_before = len(self._evicted_blocks)
        keys = super().queue(node, start, end, tier_names)
        expected = self.from_the_start(node)[start:end]
        assert keys == [each.key for each in expected]
        assert all(each.block in expected for each in self._evicted_blocks[num_before:])
        return keys

    def from_the_start(self, node: Node) -> list[KeyedBlock]:
        """Return the keyed blocks of a node; none for a public prefix, or below one that is no longer registered."""
        namespace = node.owner.namespace
        prefix_tokens = None if namespace.tenant == PUBLIC_TENANT else self._tokens_of_prefix(namespace)
        if prefix_tokens is None:
            return []
        path = prefix_tokens + b"".join(each.tokens for each in path_to(node))
        blocks = list(self.key_blocks(namespace._replace(public_prefix=""), path))
        return blocks[node.start_bytes // (BLOCK * TOKEN_BYTES) :]


class Seen(Listener):
    """Counts what happens to nodes that have keys. It is notified before `OffloadIndex`."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        self.events["grown"] += bool(leaf.keys)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        self.events["split"] += bool(lower.keys)

    def cut(self, lower: Node) -> None:
        self.events["cut"] += bool(lower.keys)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        self.events["joined"] += bool(lower.keys)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        self.events["shortened"] += bool(leaf.keys) and num_blocks < leaf.num_blocks
        self.events["gone"] += bool(leaf.keys) and num_blocks == leaf.num_blocks
        self.events["gone below a public prefix"] += bool(leaf.owner.namespace.public_prefix)

    def purged(self, node: Node) -> None:
        self.events["purged"] += bool(node.keys)


class KeyWalk(CollisionWalk):
    """A random walk with stores, between whose steps each kept key is compared."""

    def __init__(self, seed: int, tier_indexes: list[TierIndex]) -> None:
        marks = InvocationMarks()
        self.seen = Seen()
        self.index = CheckedIndex(tier_indexes, PromptKeys(KEYS, marks).blocks, BLOCK)
        super().__init__(seed, 12, listeners=(self.seen, self.index), marks=marks)
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)

    def walk(self, num_operations: int) -> Counter[str]:
        for _ in range(num_operations // 10):
            self.perform(10)
            self.index.take_evicted_blocks()
            self.check()
        return self.seen.events + Counter({each: self.events[each] for each in WRONG})

    def check(self) -> None:
        for node in self.cache.nodes():
            kept = node.keys or []
            expected = [each.key for each in self.index.from_the_start(node)]
            assert kept == expected[: len(kept)] or not expected
            above = node.parent
            if kept and above is not None and above.parent is not None:
                assert len(above.keys or ()) == above.num_blocks
            self.seen.events["kept by an invoked adapter"] += bool(kept and self.cache.marks.digest_of(node.tokens))


@pytest.mark.parametrize("names", ["host", "redis", "host redis"])
def test_keys_equal_those_from_the_start_after_any_change_of_the_trees(names: str) -> None:
    tier_indexes = [
        TierIndex("host", 200) if name == "host" else SharedTierIndex(name, 2**18) for name in names.split()
    ]
    events = sum((KeyWalk(seed, tier_indexes).walk(1000) for seed in range(2)), Counter[str]())
    wanted = {"split", "cut", "joined", "shortened", "gone", "gone below a public prefix", "purged"}
    wanted |= {"kept by an invoked adapter"} | ({"grown"} if "redis" in names else set())
    assert set(events) >= wanted
    assert not set(events) & set(WRONG)


class Counted:
    """A cache with stores, and how many blocks' tokens were hashed."""

    def __init__(self, *tier_indexes: TierIndex, num_blocks: int = 3 * LONG) -> None:
        self.num_hashed = 0
        self._keys = PromptKeys(KEYS, InvocationMarks())
        self.index = OffloadIndex(tier_indexes, self._key_blocks, BLOCK)
        self.cache = PrefixCache(
            num_blocks, BLOCK, listeners=[self.index], max_retained_blocks=num_blocks, clock=FakeClock()
        )
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)

    def put(self, ids: range, namespace: Namespace = ACME) -> None:
        with self.cache.lease(namespace, tokens(ids)) as lease:
            lease.commit(len(ids))

    def evict_one_by_one(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            assert self.cache.evict(1) == 1

    def hashed(self) -> int:
        """Return how many blocks were hashed since the last call."""
        num_hashed, self.num_hashed = self.num_hashed, 0
        return num_hashed

    def _key_blocks(self, namespace: Namespace, prompt: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        for block in self._keys.blocks(namespace, prompt, parent):
            self.num_hashed += 1
            yield block


STORES = pytest.mark.parametrize(
    "store", [TierIndex("host", 10 * LONG), SharedTierIndex("redis", 2**18)], ids=["host", "shared"]
)


@STORES
def test_a_leaf_evicted_block_by_block_is_hashed_at_most_twice(store: TierIndex) -> None:
    counted = Counted(store)
    counted.put(range(LONG * BLOCK))
    counted.hashed()
    counted.evict_one_by_one(LONG)
    assert counted.hashed() <= 2 * LONG


def test_a_prompt_that_is_published_in_chunks_is_hashed_at_most_twice() -> None:
    counted = Counted(SharedTierIndex("redis", 2**18))
    with counted.cache.lease(ACME, tokens(range(LONG * BLOCK))) as lease:
        for end in range(BLOCK, LONG * BLOCK + 1, BLOCK):
            lease.commit(end)
    assert LONG <= counted.hashed() <= 2 * LONG


def test_a_generation_is_hashed_at_most_twice() -> None:
    counted = Counted(SharedTierIndex("redis", 2**18))
    with counted.cache.lease(ACME, tokens(range(LONG * BLOCK // 2))) as lease:
        for token in range(LONG * BLOCK // 2, LONG * BLOCK):
            lease.extend(tokens([token]))
            lease.commit(lease.num_tokens)
    assert LONG <= counted.hashed() <= 2 * LONG


def test_branches_of_a_long_prompt_do_not_have_it_hashed_again() -> None:
    counted = Counted(SharedTierIndex("redis", 2**18))
    counted.put(range(LONG * BLOCK))
    counted.hashed()
    for start in range(LONG - 1, 0, -1):  # each cuts the node in which it ends
        branch = tokens(range(start * BLOCK)) + tokens(range(10_000, 10_000 + BLOCK))
        with counted.cache.lease(ACME, branch) as lease:
            lease.commit(lease.num_tokens)
    assert counted.hashed() <= LONG


def test_nodes_that_are_joined_keep_their_keys() -> None:
    counted = Counted(SharedTierIndex("redis", 2**18))
    counted.put(range(LONG * BLOCK))
    counted.cache.retain(ACME, tokens(range(LONG * BLOCK)), Retention(90, start=0, end=LONG * BLOCK // 2))
    assert len(list(counted.cache.nodes())) == 2
    counted.cache.retain(ACME, tokens(range(LONG * BLOCK)), Retention(50))
    counted.hashed()
    with counted.cache.lease(ACME, tokens(range(LONG * BLOCK + 1))):
        pass
    assert len(list(counted.cache.nodes())) == 1
    counted.evict_one_by_one(LONG)
    assert counted.hashed() == LONG


@STORES
def test_the_common_prefix_of_all_leaves_is_hashed_once(store: TierIndex) -> None:
    counted = Counted(store, num_blocks=6 * LONG)
    prefix = counted.cache.public.register("system", "model", "", tokens(range(LONG * BLOCK)))
    with counted.cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(lease.num_tokens)
    counted.cache.public.activate(prefix)
    assert counted.hashed() == 0
    for first in range(1000, 1000 + LONG):
        prompt = prefix.tokens + tokens(range(first, first + 2 * BLOCK))
        with counted.cache.lease(ACME, prompt) as lease:
            assert lease.public_tokens == LONG * BLOCK
            lease.commit(lease.num_tokens)
    counted.evict_one_by_one(2 * LONG)
    assert counted.hashed() <= LONG + 6 * LONG


@pytest.mark.parametrize("priority", [10, 90])
def test_a_leaf_with_a_priority_is_hashed_a_few_times(priority: int) -> None:
    counted = Counted(TierIndex("host", 10 * LONG))
    counted.put(range(LONG * BLOCK))
    counted.cache.retain(ACME, tokens(range(LONG * BLOCK)), Retention(priority))
    counted.evict_one_by_one(LONG)
    assert counted.hashed() <= 3 * LONG
    tier_index = counted.index.tiers["host"]
    assert {tier_index.priority_of(key) for key in tier_index} == {priority}


def test_blocks_saved_in_runs_are_hashed_once() -> None:
    counted = Counted(TierIndex("disk", 10 * LONG))
    counted.put(range(LONG * BLOCK))
    (node,) = counted.cache.nodes()
    for start in range(0, LONG, 8):
        counted.index.queue(node, start, start + 8, ["disk"])
    assert counted.hashed() == LONG


def test_without_stores_nothing_is_hashed_or_kept() -> None:
    counted = Counted()
    counted.put(range(LONG * BLOCK))
    counted.put(range(BLOCK, 3 * BLOCK))
    counted.evict_one_by_one(10)
    assert counted.hashed() == 0
    assert all(node.keys is None for node in counted.cache.nodes())
