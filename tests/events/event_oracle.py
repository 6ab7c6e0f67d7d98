"""A reader of cache events, and an oracle that compares the blocks that the reader knows with the trees."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import TreeFeed
from radixkv.tokens import TOKEN_BYTES

KEY = bytes(range(32))


class Knowledge:
    """The blocks that a reader knows from the event batches that it has read.

    `read` asserts that each block is stored once, after its parent, and removed only while it is stored.

    Attributes:
        blocks: hash of the parent (None for the first block of a prompt), tokens and cache salt, by hash of the block.
        last_number: sequence number of the last batch; None before the first one.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, bytes, str]] = {}
        self.last_number: int | None = None

    def read(self, batch: EventBatch) -> None:
        if batch.snapshot is None:
            assert self.last_number is None or batch.sequence_number == self.last_number + 1
        else:
            assert isinstance(batch.events[0], AllCleared) == (batch.snapshot.index == 0)
        self.last_number = batch.sequence_number
        assert batch.events
        for event in batch.events:
            if isinstance(event, AllCleared):
                self.blocks.clear()
            elif isinstance(event, BlocksStored):
                self._store(event)
            else:
                self._remove(event)

    def _store(self, event: BlocksStored) -> None:
        parent, block_bytes = event.parent_hash, TOKEN_BYTES * event.block_size
        hashes = np.frombuffer(event.block_hashes, "<u8").tolist()
        assert len(event.tokens) == block_bytes * len(hashes) > 0
        for index, block_hash in enumerate(hashes):
            assert block_hash not in self.blocks, "the block is stored already"
            assert parent is None or self.blocks[parent][2] == event.cache_salt, "the parent is in another namespace"
            tokens = event.tokens[index * block_bytes : (index + 1) * block_bytes]
            self.blocks[block_hash] = (parent, tokens, event.cache_salt)
            parent = block_hash

    def _remove(self, event: BlocksRemoved) -> None:
        for block_hash in np.frombuffer(event.block_hashes, "<u8").tolist():
            assert self.blocks.pop(block_hash)[2] == event.cache_salt


class WatchedCache:
    """The event log of a cache, with a reader that reads it from the beginning.

    The caller registers `feed` as a listener of the cache. `verify` compares what the reader knows with the trees.
    """

    def __init__(self, block_size: int, pool_block_size: int, max_step_blocks: int = 2**30) -> None:
        self.block_size = block_size
        self.identities = Identities("", KEY)
        self.log = EventLog()
        self.feed = TreeFeed(self.log, block_size, pool_block_size, self.identities, max_step_blocks)
        self.reader = Knowledge()
        self.snapshot: Snapshot | None = None

    def verify(self, cache: PrefixCache) -> int:
        """Publish the recorded events, and compare the blocks that the reader knows with the trees.

        Returns:
            The number of event blocks; -1 if nothing was compared, because the log has ended or not all recorded
            changes are published yet.
        """
        if self.log.error is not None:  # the engine was closed
            return -1
        self.feed.publish()
        while self.reader.last_number != self.log.last and self.log.num_batches:
            batch = self.log.after(self.log.start if self.reader.last_number is None else self.reader.last_number)
            assert batch is not None
            self.reader.read(batch)
        if self.feed.has_backlog:
            return -1
        expected = self._blocks_in(cache)
        assert self.reader.blocks == expected
        assert self.feed._stored_blocks.num_blocks == len(expected)
        return len(expected)

    def _blocks_in(self, cache: PrefixCache) -> dict[int, tuple[int | None, bytes, str]]:
        """Compute the event blocks of the trees from the tokens of each path, in the form of `Knowledge.blocks`."""
        block_bytes = TOKEN_BYTES * self.block_size
        blocks: dict[int, tuple[int | None, bytes, str]] = {}
        for tree in cache._trees.values():
            root, salt = self.identities.of(tree.owner.namespace)
            for node in tree.nodes():
                tokens, parent = tree.path_tokens(node)[len(tree.root.tokens) :], None
                for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
                    previous_hash = root if parent is None else parent.to_bytes(8, "little")
                    block_tokens = tokens[start : start + block_bytes]
                    block_hash = xxh3_64_intdigest(previous_hash + block_tokens)
                    blocks[block_hash] = (parent, block_tokens, salt)
                    parent = block_hash
        return blocks
