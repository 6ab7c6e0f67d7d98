"""A snapshot of all cached blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from radixkv.api.events import HASH_BYTES, AllCleared, BlocksStored, Event, EventBatch, SnapshotPart
from radixkv.events.store_feed import TrackedBlock

MAX_PART_BLOCKS = 512  # 37 kB per message, which each stalled reader may keep in memory
_MAX_STORED_PART_BLOCKS = 4096  # 33 kB: without tokens


class StoredRun(NamedTuple):
    """The event blocks that end in one node.

    Attributes:
        root: packed root of the namespace.
        cache_salt: as in `BlocksStored`.
        before: packed hash of the block before the run, or `root`.
        hashes: packed hashes.
        num_shared: number of leading blocks that other runs may contain as well.
        tail: tokens before the node in the event block in which it begins.
        tokens: tokens of the node.
    """

    root: bytes
    cache_salt: str
    before: bytes
    hashes: bytes
    num_shared: int
    tail: bytes
    tokens: bytes


class Snapshot:
    """The blocks that are cached after one batch. It references the tokens of the trees without copying them.

    Args:
        sequence_number: the number of that batch.
        runs: the event blocks of all nodes, parents before children.
        block_size: tokens of an event block.
        tracked_blocks: the blocks in stores whose hashes are known.

    Attributes:
        sequence_number: see above.
    """

    def __init__(
        self, sequence_number: int, runs: list[StoredRun], block_size: int, tracked_blocks: Sequence[TrackedBlock] = ()
    ) -> None:
        self.sequence_number = sequence_number
        self._runs = runs
        self._tracked_blocks = tracked_blocks
        self._block_size = block_size
        self._time_s = time.time()

    @cached_property
    def batches(self) -> tuple[EventBatch, ...]:
        """The snapshot as batches, all with its number; the first one begins with `AllCleared`, stores come last.

        Complexity: O(nodes + tokens) for the first access, from any thread.
        """
        parts: list[list[Event]] = [[AllCleared()]]
        num_blocks, num_free = 0, MAX_PART_BLOCKS  # device blocks in all parts; space for more in the last part
        shared: set[bytes] = set()
        for run in self._runs:
            position, end = _record_shared(run, shared), len(run.hashes) // HASH_BYTES
            num_blocks += end - position
            while position < end:
                if not num_free:
                    parts.append([])
                    num_free = MAX_PART_BLOCKS
                piece = self._piece(run, position, min(end, position + num_free))
                parts[-1].append(piece)
                position += piece.num_blocks
                num_free -= piece.num_blocks
        parts += ([piece] for piece in self._stored_pieces())
        return tuple(
            EventBatch(self.sequence_number, self._time_s, tuple(events), SnapshotPart(index, len(parts), num_blocks))
            for index, events in enumerate(parts)
        )

    def _stored_pieces(self) -> Iterator[BlocksStored]:
        """Yield the blocks of each store and namespace."""
        hashes_of: dict[tuple[str, str], list[bytes]] = {}
        for block in self._tracked_blocks:
            for store in block.stores:
                hashes_of.setdefault((store, block.cache_salt), []).append(block.hashes)
        max_bytes = _MAX_STORED_PART_BLOCKS * HASH_BYTES
        for (store, cache_salt), packed_hashes in hashes_of.items():
            hashes = b"".join(packed_hashes)
            for start in range(0, len(hashes), max_bytes):
                yield BlocksStored(None, hashes[start : start + max_bytes], b"", self._block_size, cache_salt, store)

    def _piece(self, run: StoredRun, start: int, end: int) -> BlocksStored:
        """Return the blocks `[start, end)` of a run."""
        before = run.hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else run.before
        block_bytes = 4 * self._block_size
        tokens = run.tail + run.tokens if run.tail else run.tokens
        return BlocksStored(
            None if before == run.root else int.from_bytes(before, "little"),
            run.hashes[start * HASH_BYTES : end * HASH_BYTES],
            tokens[start * block_bytes : end * block_bytes],
            self._block_size,
            run.cache_salt,
        )


def _record_shared(run: StoredRun, shared: set[bytes]) -> int:
    """Add the blocks of a run that other runs may contain as well to `shared`.

    Returns:
        How many of them earlier runs have already added. They precede the others.
    """
    num_present = 0
    for start in range(0, run.num_shared * HASH_BYTES, HASH_BYTES):
        block = run.hashes[start : start + HASH_BYTES]
        num_present += block in shared
        shared.add(block)
    return num_present
