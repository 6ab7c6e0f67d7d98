"""Events report which blocks the stores below the device hold, by the hashes that the blocks had on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from radixkv.api.events import DEVICE, HASH_BYTES, AllCleared, BlocksRemoved, EventBatch
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events import snapshot as snapshots
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import TierIndex
from radixkv.tokens import TOKEN_BYTES

EVENT_BLOCK_SIZE, BLOCK_SIZE = 2, 4  # tokens of a block in events, and of a block of the pool
BLOCK_BYTES = TOKEN_BYTES * BLOCK_SIZE
EVENT_BLOCKS_PER_BLOCK = BLOCK_SIZE // EVENT_BLOCK_SIZE
BASE, ACME = Namespace("m"), Namespace("m", "acme")


def prompt(ids: range) -> bytes:
    return np.array(ids, "<u4").tobytes()


def key_blocks(namespace: Namespace, tokens: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
    """Yield the blocks of a prompt, with readable keys: the tenant, and all tokens up to the end of the block.

    Blocks with token ids from 1,000 on belong to the namespace of an invoked adapter.
    """
    if parent is None:
        parent = namespace.tenant.encode() + b"|"
    for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block_tokens = tokens[start : start + BLOCK_BYTES]
        is_invoked = np.frombuffer(block_tokens, "<u4").max() >= 1000
        owner = namespace._replace(adapter="invoked") if is_invoked else namespace
        key = parent + block_tokens
        yield KeyedBlock(key, parent, block_tokens, owner)
        parent = key


class Reader:
    """The event blocks that a reader knows in each tier. `read` requires that each is stored once and removed once.

    Attributes:
        blocks: cache salts and packed hashes of the event blocks, by tier.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[tuple[str, bytes]]] = {}

    def read(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllCleared):
                if batch.snapshot is None:
                    self.blocks.pop(DEVICE, None)
                else:
                    self.blocks.clear()
                continue
            tier_blocks = self.blocks.setdefault(event.tier, set())
            for start in range(0, len(event.block_hashes), HASH_BYTES):
                block = event.cache_salt, event.block_hashes[start : start + HASH_BYTES]
                if isinstance(event, BlocksRemoved):
                    tier_blocks.remove(block)
                else:
                    assert block not in tier_blocks
                    tier_blocks.add(block)

    def of(self, tier: str) -> set[tuple[str, bytes]]:
        return self.blocks.get(tier, set())


class Watched:
    """A cache with an index of stores, whose contents the test sets, and a reader of the events of both."""

    def __init__(
        self,
        *tier_indexes: TierIndex,
        num_blocks: int = 4,
        event_block_size: int = EVENT_BLOCK_SIZE,
        is_on: bool = True,
    ) -> None:
        self.tiers = tier_indexes or (TierIndex("host", 100),)
        self.index = OffloadIndex(self.tiers, key_blocks, BLOCK_SIZE)
        self.identities = Identities("", bytes(range(32)))
        self.log = EventLog()
        self.feed = TreeFeed(self.log, event_block_size, BLOCK_SIZE, self.identities)
        self.feed.follow(self.index)
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, listeners=[self.feed, self.index])
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)
        self.reader = Reader()
        self.last_number = self.log.start
        if is_on:
            self.feed.switch_on(self.cache.nodes)

    def put(self, ids: range, namespace: Namespace = BASE) -> None:
        with self.cache.lease(namespace, prompt(ids)) as lease:
            lease.commit(len(ids))

    def evict(self, num_blocks: int) -> list[bytes]:
        """Evict blocks from the device. Returns the keys of those to store."""
        self.cache.evict(num_blocks)
        return [each.block.key for each in self.index.take_evicted_blocks()[0]]

    def publish(self) -> Reader:
        """Publish events and read them."""
        self.feed.publish()
        while (batch := self.log.after(self.last_number)) is not None:
            self.reader.read(batch)
            self.last_number = batch.sequence_number
        return self.reader

    def take_snapshot(self) -> Snapshot:
        answer: Future[Snapshot] = Future()
        self.feed.request_snapshot(answer)
        self.feed.publish()
        return answer.result(0)

    def event_blocks(self, ids: range, start: int = 0, namespace: Namespace = BASE) -> set[tuple[str, bytes]]:
        """Return the event blocks of a prompt from the token with the index `start` on, as in `Reader.blocks`."""
        root, salt = self.identities.of(namespace)
        packed_hashes = hash_blocks(root, prompt(ids), TOKEN_BYTES * EVENT_BLOCK_SIZE)
        first_byte = start // EVENT_BLOCK_SIZE * HASH_BYTES
        return {
            (salt, packed_hashes[byte : byte + HASH_BYTES])
            for byte in range(first_byte, len(packed_hashes), HASH_BYTES)
        }

    def held_event_blocks(self, name: str) -> set[tuple[str, bytes]]:
        """Return the event blocks of the blocks that a store holds, computed from the keys in its index."""
        tier_index, event_blocks = self.index.tiers[name], set()
        for key in tier_index:
            if tier_index.holds(key):
                namespace = tier_index.owned[key]
                ids = np.frombuffer(key.partition(b"|")[2], "<u4").tolist()
                event_blocks |= self.event_blocks(ids, len(ids) - BLOCK_SIZE, namespace)
        return event_blocks


def test_a_stored_block_is_reported_with_the_hash_that_it_had_on_the_device() -> None:
    watched = Watched()
    watched.put(range(12))
    on_device = set(watched.publish().of(DEVICE))
    assert on_device == watched.event_blocks(range(12))
    keys = watched.evict(2)
    assert watched.publish().blocks == {DEVICE: watched.event_blocks(range(4))}
    watched.index.stored("host", keys)
    assert watched.feed.has_backlog
    assert watched.publish().of("host") == watched.event_blocks(range(12), 4)
    assert watched.reader.of("host") < on_device


def test_readers_of_the_device_get_no_store_events() -> None:
    watched = Watched()
    watched.put(range(8))
    watched.index.stored("host", watched.evict(1))
    watched.feed.publish()
    batch = watched.log.after(watched.last_number)
    assert batch is not None
    assert {getattr(event, "tier", DEVICE) for event in batch.events} == {DEVICE, "host"}
    assert {event.tier for event in batch.device_events if not isinstance(event, AllCleared)} == {DEVICE}


def test_a_block_that_a_store_dropped_or_never_got_is_forgotten() -> None:
    watched = Watched(TierIndex("host", 2), TierIndex("disk", 3))
    watched.put(range(16))
    keys = watched.evict(4)
    for name in ("host", "disk"):
        watched.index.stored(name, [key for key in keys if key in watched.index.tiers[name]])
    assert watched.publish().of("host") == watched.event_blocks(range(8)), (
        "the device evicts the last blocks of the prompt first, and the store drops them for the first ones"
    )
    assert watched.reader.of("disk") == watched.event_blocks(range(12))
    watched.index.lost("host", keys)
    assert (watched.publish().of("host"), len(watched.reader.of("disk"))) == (set(), 3 * EVENT_BLOCKS_PER_BLOCK)
    watched.index.lost("disk", keys)
    assert watched.publish().of("disk") == set()
    assert watched.feed._store_feed.tracked_blocks() == []


def test_blocks_of_an_earlier_process_are_reported_when_a_prompt_finds_them() -> None:
    watched = Watched(is_on=False)
    watched.put(range(12))
    watched.index.stored("host", watched.evict(2))
    watched.feed.switch_on(watched.cache.nodes)
    assert watched.publish().of("host") == set()
    assert len(watched.index.find(BASE, prompt(range(13)), 1)) == 2
    assert watched.publish().of("host") == watched.event_blocks(range(12), 4)


def test_a_snapshot_lists_the_stores_in_parts_of_their_own(monkeypatch) -> None:
    monkeypatch.setattr(snapshots, "_MAX_STORED_PART_BLOCKS", 2)
    watched = Watched(TierIndex("host", 100), TierIndex("disk", 100))
    for namespace in (BASE, ACME):
        watched.put(range(8), namespace)
        keys = watched.evict(2)
        watched.index.stored("host", keys)
        watched.index.stored("disk", keys[:1])
    watched.put(range(4))
    late = Reader()
    late.blocks["host"] = {("", bytes(HASH_BYTES))}  # an outdated block, which the snapshot removes
    batches = watched.take_snapshot().batches
    for batch in batches:
        late.read(batch)
    assert late.blocks == watched.publish().blocks
    assert len(late.of("host")) == 2 * 2 * EVENT_BLOCKS_PER_BLOCK, "two namespaces with two blocks"
    assert len(batches) == 1 + 4 + 2, "one for the device; for each namespace two for the host, and one for the disk"
    assert batches[0].snapshot is not None
    assert batches[0].snapshot.num_blocks == EVENT_BLOCKS_PER_BLOCK, "only the block on the device"


def test_a_purge_that_empties_the_device_leaves_the_stores_of_others() -> None:
    watched = Watched()
    watched.put(range(8))
    watched.index.stored("host", watched.evict(2))
    watched.put(range(8), ACME)
    watched.cache.purge(tenant="acme")
    watched.index.purge("acme", None, None)
    assert watched.publish().blocks == {"host": watched.event_blocks(range(8))}
    watched.index.purge("", None, None)
    assert watched.publish().of("host") == set()


def test_blocks_of_invoked_adapters_are_not_published() -> None:
    watched = Watched()
    ids = [*range(4), *range(1000, 1008)]
    watched.put(ids)
    keys = watched.evict(3)
    assert len(keys) == 3
    watched.index.stored("host", keys)
    assert watched.publish().of("host") == watched.event_blocks(range(4))


def test_stores_are_not_reported_if_event_blocks_do_not_divide_those_of_the_pool() -> None:
    watched = Watched(event_block_size=3)
    watched.put(range(12))
    watched.index.stored("host", watched.evict(2))
    assert set(watched.publish().blocks) == {DEVICE}


def test_a_large_change_is_published_in_pieces_before_a_snapshot() -> None:
    watched = Watched(num_blocks=64)
    watched.feed._max_step_blocks = 8
    watched.put(range(64 * BLOCK_SIZE))
    while watched.feed.has_backlog:
        watched.publish()
    watched.index.stored("host", watched.evict(64))
    answer: Future[Snapshot] = Future()
    watched.feed.request_snapshot(answer)
    num_batches = 0
    while watched.feed.has_backlog:
        num_reported = len(watched.publish().of("host"))
        num_batches += 1
        assert num_reported <= (8 + EVENT_BLOCKS_PER_BLOCK) * num_batches, "at most one block of the pool too many"
        assert answer.done() == (num_reported == 64 * EVENT_BLOCKS_PER_BLOCK)
    assert num_batches > 8


def test_events_match_the_contents_of_stores_after_random_operations() -> None:
    """Evictions, saves that succeed, fail or are late, blocks that stores lose, purges and look-ups."""
    for seed in range(20):
        draw = random.Random(seed)
        watched = Watched(TierIndex("host", 5), TierIndex("disk", 9), num_blocks=8)
        evicted: list[bytes] = []  # keys of all blocks that were evicted from the device
        for _ in range(120):
            operation = draw.randrange(10)
            namespace, length = draw.choice((BASE, ACME)), draw.randrange(1, 30)
            ids = range(first := 100 * draw.randrange(3), first + length)
            if operation < 4:
                watched.put(ids, namespace)
                evicted += watched.evict(0)  # takes the blocks that were evicted for the prompt
            elif operation < 7:
                evicted += watched.evict(draw.randrange(1, 5))
            elif operation == 7:
                watched.index.find(namespace, prompt(ids), 0)
            elif operation == 8:
                name = draw.choice(("host", "disk"))
                report = draw.choice((watched.index.stored, watched.index.stored, watched.index.lost))
                report(name, [key for key in evicted if draw.random() < 0.7])
            else:
                tenant = draw.choice(("acme", "", "unknown"))
                watched.cache.purge(tenant=tenant)
                watched.index.purge(tenant, None, None)
            reader = watched.publish()
            for name in ("host", "disk"):
                assert reader.of(name) == watched.held_event_blocks(name), (seed, name)
            indexed = {key for tier_index in watched.tiers for key in tier_index}
            assert set(watched.feed._store_feed._tracked) <= indexed
