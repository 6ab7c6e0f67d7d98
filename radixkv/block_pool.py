"""Physical block ids: which are free, and who holds the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.errors import DoubleRelease, InvariantViolation, OutOfBlocks

BlockIds = npt.NDArray[np.int32]


class BlockPool:
    """Hands out block ids and counts their owners. Holds no memory itself.

        acquire              publish
    free ──────▶ leased ◀──────────────▶ published
      ◀──────────        unpublish

    A block's reference count is the number of leases that hold it, plus one while the tree does. It returns to the
    free list when the last owner lets go, whoever that is. At all times `num_free + num_leased + num_published ==
    num_blocks`.

    Every method takes or returns int32 arrays of distinct ids and costs O(len) without a Python loop. A method that
    raises has changed nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_published = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack; the top is at num_free
        self._reference_counts = np.zeros(num_blocks, dtype=np.int32)
        self._is_published = np.zeros(num_blocks, dtype=np.int32)  # 0 or 1: the tree's share of the count

    @property
    def num_leased(self) -> int:
        """Blocks that only leases own."""
        return self.num_blocks - self.num_free - self.num_published

    def acquire(self, num_blocks: int) -> BlockIds:
        """Take blocks off the free list, each with one reference: the caller's.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"block pool: expected {num_blocks} free blocks, got {self.num_free}")
        block_ids = self._free[self.num_free - num_blocks : self.num_free][::-1].copy()
        self.num_free -= num_blocks
        self._reference_counts[block_ids] = 1
        return block_ids

    def retain(self, block_ids: BlockIds) -> None:
        """Add a lease's reference to blocks that somebody already owns.

        Raises:
            InvariantViolation: one of them is free.
        """
        counts = self._reference_counts[block_ids]
        if counts.size and counts.min() < 1:
            raise InvariantViolation("block pool: a free block can't be retained")
        self._reference_counts[block_ids] = counts + 1

    def release(self, block_ids: BlockIds) -> None:
        """Drop a lease's reference; blocks without an owner become free.

        Raises:
            DoubleRelease: no lease holds one of them.
        """
        counts = self._reference_counts[block_ids]
        if counts.size and (counts - self._is_published[block_ids]).min() < 1:
            raise DoubleRelease("block pool: a block was released by somebody who does not hold it")
        self._drop(block_ids, counts - 1)

    def publish(self, block_ids: BlockIds) -> None:
        """Add the tree's reference: the blocks are matchable now.

        Raises:
            InvariantViolation: one of them is free, or published already.
        """
        counts = self._reference_counts[block_ids]
        if counts.size and (counts.min() < 1 or self._is_published[block_ids].any()):
            raise InvariantViolation("block pool: only a leased block can be published")
        self._reference_counts[block_ids] = counts + 1
        self._is_published[block_ids] = 1
        self.num_published += block_ids.size

    def unpublish(self, block_ids: BlockIds) -> None:
        """Drop the tree's reference; blocks without an owner become free.

        Raises:
            InvariantViolation: the tree does not hold one of them.
        """
        if not self._is_published[block_ids].all():
            raise InvariantViolation("block pool: only a published block can be unpublished")
        self._is_published[block_ids] = 0
        self.num_published -= block_ids.size
        self._drop(block_ids, self._reference_counts[block_ids] - 1)

    def _drop(self, block_ids: BlockIds, counts: BlockIds) -> None:
        self._reference_counts[block_ids] = counts
        freed = block_ids[counts == 0]
        self._free[self.num_free : self.num_free + freed.size] = freed
        self.num_free += freed.size

    def reference_count(self, block_id: int) -> int:
        """Owners of one block; 0 if it is free."""
        return int(self._reference_counts[block_id])

    def check(self, reference_counts: BlockIds, published: BlockIds) -> None:
        """Compare the pool with owners that were counted independently.

        Args:
            reference_counts: int32 `[num_blocks]`, the owners of each block.
            published: ids that the tree holds, in any order.

        Raises:
            InvariantViolation: the message says which count is wrong.
        """
        if not np.array_equal(self._reference_counts, reference_counts):
            wrong = np.flatnonzero(self._reference_counts != reference_counts)
            raise InvariantViolation(f"block pool: reference counts of {wrong.size} blocks are wrong, first {wrong[0]}")
        if not np.array_equal(np.flatnonzero(self._is_published), np.sort(published)):
            raise InvariantViolation("block pool: the published blocks are not the tree's blocks")
        if self.num_published != published.size:
            raise InvariantViolation(f"block pool: num_published {self.num_published}, counted {published.size}")
        free = np.sort(self._free[: self.num_free])
        if not np.array_equal(free, np.flatnonzero(reference_counts == 0)):
            raise InvariantViolation("block pool: the free list is not the blocks without an owner")
