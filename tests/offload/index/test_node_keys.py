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

BLOCK_SIZE = 4
KEYS = BlockKeys(BlockFormat("model", "float32", "fp32", "by block", BLOCK_SIZE, 64, "cpu"), b"secret")
ACME = Namespace("model", "acme")
LONG_BLOCKS = 200  # blocks of a long prompt


class CheckedIndex(OffloadIndex):
    """An index that compares each key that it computes with the key computed from the start of the prompt."""

    def queue(self, node: Node, start: int, end: int, tier_names: Iterable[str]) -> list[bytes]:
        num_before = len(self._evicted_blocks)
        keys = super().queue(node, start, end, tier_names)
        expected = self.keyed_blocks_from_start(node)[start:end]
        assert keys == [each.key for each in expected]
        assert all(each.block in expected for each in self._evicted_blocks[num_before:])
        return keys

    def keyed_blocks_from_start(self, node: Node) -> list[KeyedBlock]:
        """Return the keyed blocks of a node; none for a public prefix, or below one that is no longer registered."""
        namespace = node.owner.namespace
        prefix_tokens = None if namespace.tenant == PUBLIC_TENANT else self._tokens_of_prefix(namespace)
        if prefix_tokens is None:
            return []
        path = prefix_tokens + b"".join(each.tokens for each in path_to(node))
        blocks = list(self.key_blocks(namespace._replace(public_prefix=""), path))
        return blocks[node.start_bytes // (BLOCK_SIZE * TOKEN_BYTES) :]


class NodeEvents(Listener):
    """Counts the changes of nodes that have keys. It must be notified before `OffloadIndex`, which changes the keys."""

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
    """A random walk over a cache with stores, which compares all keys that nodes keep after every ten operations."""

    def __init__(self, seed: int, tier_indexes: list[TierIndex]) -> None:
        marks = InvocationMarks()
        self.node_events = NodeEvents()
        self.index = CheckedIndex(tier_indexes, PromptKeys(KEYS, marks).blocks, BLOCK_SIZE)
        super().__init__(seed, 12, listeners=(self.node_events, self.index), marks=marks)
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)

    def walk(self, num_operations: int) -> Counter[str]:
        for _ in range(num_operations // 10):
            self.perform(10)
            self.index.take_evicted_blocks()
            self.check()
        return self.node_events.events + Counter({each: self.events[each] for each in WRONG})

    def check(self) -> None:
        for node in self.cache.nodes():
            kept_keys = node.keys or []
            expected = [each.key for each in self.index.keyed_blocks_from_start(node)]
            assert kept_keys == expected[: len(kept_keys)] or not expected
            parent = node.parent
            if kept_keys and parent is not None and parent.parent is not None:
                assert len(parent.keys or ()) == parent.num_blocks
            self.node_events.events["kept by an invoked adapter"] += bool(
                kept_keys and self.cache.marks.digest_of(node.tokens)
            )


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


class CountingCache:
    """A cache with an index of stores, which counts the blocks whose keys are computed (hashed)."""

    def __init__(self, *tier_indexes: TierIndex, num_blocks: int = 3 * LONG_BLOCKS) -> None:
        self.num_hashed = 0
        self._keys = PromptKeys(KEYS, InvocationMarks())
        self.index = OffloadIndex(tier_indexes, self._key_blocks, BLOCK_SIZE)
        self.cache = PrefixCache(
            num_blocks, BLOCK_SIZE, listeners=[self.index], max_retained_blocks=num_blocks, clock=FakeClock()
        )
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)

    def put(self, ids: range, namespace: Namespace = ACME) -> None:
        with self.cache.lease(namespace, tokens(ids)) as lease:
            lease.commit(len(ids))

    def evict_one_by_one(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            assert self.cache.evict(1) == 1

    def take_num_hashed(self) -> int:
        """Return the number of blocks that were hashed since the last call, and reset it."""
        num_hashed, self.num_hashed = self.num_hashed, 0
        return num_hashed

    def _key_blocks(self, namespace: Namespace, prompt: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        for block in self._keys.blocks(namespace, prompt, parent):
            self.num_hashed += 1
            yield block


STORES = pytest.mark.parametrize(
    "store", [TierIndex("host", 10 * LONG_BLOCKS), SharedTierIndex("redis", 2**18)], ids=["host", "shared"]
)


@STORES
def test_a_leaf_evicted_block_by_block_is_hashed_at_most_twice(store: TierIndex) -> None:
    counted = CountingCache(store)
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    counted.take_num_hashed()
    counted.evict_one_by_one(LONG_BLOCKS)
    assert counted.take_num_hashed() <= 2 * LONG_BLOCKS


def test_a_prompt_that_is_published_in_chunks_is_hashed_at_most_twice() -> None:
    counted = CountingCache(SharedTierIndex("redis", 2**18))
    with counted.cache.lease(ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE))) as lease:
        for end in range(BLOCK_SIZE, LONG_BLOCKS * BLOCK_SIZE + 1, BLOCK_SIZE):
            lease.commit(end)
    assert LONG_BLOCKS <= counted.take_num_hashed() <= 2 * LONG_BLOCKS


def test_a_generation_is_hashed_at_most_twice() -> None:
    counted = CountingCache(SharedTierIndex("redis", 2**18))
    with counted.cache.lease(ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE // 2))) as lease:
        for token in range(LONG_BLOCKS * BLOCK_SIZE // 2, LONG_BLOCKS * BLOCK_SIZE):
            lease.extend(tokens([token]))
            lease.commit(lease.num_tokens)
    assert LONG_BLOCKS <= counted.take_num_hashed() <= 2 * LONG_BLOCKS


def test_branches_of_a_long_prompt_do_not_have_it_hashed_again() -> None:
    counted = CountingCache(SharedTierIndex("redis", 2**18))
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    counted.take_num_hashed()
    for start in range(LONG_BLOCKS - 1, 0, -1):  # each branch splits the node in which it diverges
        branch = tokens(range(start * BLOCK_SIZE)) + tokens(range(10_000, 10_000 + BLOCK_SIZE))
        with counted.cache.lease(ACME, branch) as lease:
            lease.commit(lease.num_tokens)
    assert counted.take_num_hashed() <= LONG_BLOCKS


def test_nodes_that_are_joined_keep_their_keys() -> None:
    counted = CountingCache(SharedTierIndex("redis", 2**18))
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    counted.cache.retain(
        ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE)), Retention(90, start=0, end=LONG_BLOCKS * BLOCK_SIZE // 2)
    )
    assert len(list(counted.cache.nodes())) == 2
    counted.cache.retain(ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE)), Retention(50))
    counted.take_num_hashed()
    with counted.cache.lease(ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE + 1))):
        pass
    assert len(list(counted.cache.nodes())) == 1
    counted.evict_one_by_one(LONG_BLOCKS)
    assert counted.take_num_hashed() == LONG_BLOCKS


@STORES
def test_the_common_prefix_of_all_leaves_is_hashed_once(store: TierIndex) -> None:
    counted = CountingCache(store, num_blocks=6 * LONG_BLOCKS)
    prefix = counted.cache.public.register("system", "model", "", tokens(range(LONG_BLOCKS * BLOCK_SIZE)))
    with counted.cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(lease.num_tokens)
    counted.cache.public.activate(prefix)
    assert counted.take_num_hashed() == 0
    for first in range(1000, 1000 + LONG_BLOCKS):
        prompt = prefix.tokens + tokens(range(first, first + 2 * BLOCK_SIZE))
        with counted.cache.lease(ACME, prompt) as lease:
            assert lease.public_tokens == LONG_BLOCKS * BLOCK_SIZE
            lease.commit(lease.num_tokens)
    counted.evict_one_by_one(2 * LONG_BLOCKS)
    assert counted.take_num_hashed() <= LONG_BLOCKS + 6 * LONG_BLOCKS


@pytest.mark.parametrize("priority", [10, 90])
def test_a_leaf_with_a_priority_is_hashed_a_few_times(priority: int) -> None:
    counted = CountingCache(TierIndex("host", 10 * LONG_BLOCKS))
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    counted.cache.retain(ACME, tokens(range(LONG_BLOCKS * BLOCK_SIZE)), Retention(priority))
    counted.evict_one_by_one(LONG_BLOCKS)
    assert counted.take_num_hashed() <= 3 * LONG_BLOCKS
    tier_index = counted.index.tiers["host"]
    assert {tier_index.priority_of(key) for key in tier_index} == {priority}


def test_blocks_saved_in_runs_are_hashed_once() -> None:
    counted = CountingCache(TierIndex("disk", 10 * LONG_BLOCKS))
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    (node,) = counted.cache.nodes()
    for start in range(0, LONG_BLOCKS, 8):
        counted.index.queue(node, start, start + 8, ["disk"])
    assert counted.take_num_hashed() == LONG_BLOCKS


def test_without_stores_nothing_is_hashed_or_kept() -> None:
    counted = CountingCache()
    counted.put(range(LONG_BLOCKS * BLOCK_SIZE))
    counted.put(range(BLOCK_SIZE, 3 * BLOCK_SIZE))
    counted.evict_one_by_one(10)
    assert counted.take_num_hashed() == 0
    assert all(node.keys is None for node in counted.cache.nodes())
