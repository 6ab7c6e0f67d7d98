"""Readers of cache events, and an oracle that compares their view with the trees."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import TreeFeed

KEY = bytes(range(32))


class Knowledge:
    """The blocks that a reader knows. Each is stored once, after its parent, and removed only while it is there."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, bytes, str]] = {}  # hash: parent, tokens, salt
        self.number: int | None = None

    def read(self, batch: EventBatch) -> None:
        if batch.snapshot is None:
            assert self.number is None or batch.sequence_number == self.number + 1
        else:
            assert isinstance(batch.events[0], AllCleared) == (batch.snapshot.index == 0)
        self.number = batch.sequence_number
        assert batch.events
        for event in batch.events:
            if isinstance(event, AllCleared):
                self.blocks.clear()
            elif isinstance(event, BlocksStored):
                self._store(event)
            else:
                self._remove(event)

    def _store(self, event: BlocksStored) -> None:
        parent, size = event.parent_hash, 4 * event.block_size
        hashes = np.frombuffer(event.block_hashes, "<u8").tolist()
        assert len(event.tokens) == size * len(hashes) > 0
        for index, block in enumerate(hashes):
            assert block not in self.blocks, "it is stored already"
            assert parent is None or self.blocks[parent][2] == event.cache_salt, "its parent is not"
            self.blocks[block] = (parent, event.tokens[index * size : (index + 1) * size], event.cache_salt)
            parent = block

    def _remove(self, event: BlocksRemoved) -> None:
        for block in np.frombuffer(event.block_hashes, "<u8").tolist():
            assert self.blocks.pop(block)[2] == event.cache_salt


class WatchedCache:
    """A cache's event log with a reader from the beginning, judged by a walk through the trees."""

    def __init__(self, block_size: int, pool_block_size: int, max_step_blocks: int = 2**30) -> None:
        self.block_size = block_size
        self.identities = Identities("", KEY)
        self.log = EventLog()
        self.feed = TreeFeed(self.log, block_size, pool_block_size, self.identities, max_step_blocks)
        self.reader = Knowledge()
        self.snapshot: Snapshot | None = None

    def verify(self, cache: PrefixCache) -> int:
        """Publish, and compare with the trees. Returns the number of blocks."""
        if self.log.error is not None:  # the engine was closed
            return -1
        self.feed.publish()
        while self.reader.number != self.log.last and self.log.num_batches:
            batch = self.log.after(self.log.start if self.reader.number is None else self.reader.number)
            assert batch is not None
            self.reader.read(batch)
        if self.feed.has_backlog:
            return -1
        expected = self.expected(cache)
        assert self.reader.blocks == expected
        assert self.feed._stored_blocks.num_blocks == len(expected)
        return len(expected)

    def expected(self, cache: PrefixCache) -> dict[int, tuple[int | None, bytes, str]]:
        """List the blocks that the trees hold, from the tokens of each path."""
        found: dict[int, tuple[int | None, bytes, str]] = {}
        for tree in cache._trees.values():
            root, salt = self.identities.of(tree.owner.namespace)
            for node in tree.nodes():
                tokens, parent = tree.path_tokens(node)[len(tree.root.tokens) :], None
                for start in range(0, len(tokens) - 4 * self.block_size + 1, 4 * self.block_size):
                    before = root if parent is None else parent.to_bytes(8, "little")
                    block = tokens[start : start + 4 * self.block_size]
                    number = xxh3_64_intdigest(before + block)
                    found[number] = (parent, block, salt)
                    parent = number
        return found
