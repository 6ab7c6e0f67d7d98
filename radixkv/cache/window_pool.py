"""The pool of one group of windowed layers. A part is the memory that holds a block's K/V of these layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.blocks import BlockIds
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.part_memory import PartMemory, PartShare
from radixkv.cache.part_queue import PartQueue
from radixkv.errors import InvariantViolation, OutOfBlocks, require_invariant


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tokens before a position are needed to continue from there.

        tokens   [0 ............................ upto - num_tokens ........ upto)
        parts     not needed                       | needed to compute from `upto`

    Layers with a sliding window of `w` tokens need `w - 1` before the next one.

    Attributes:
        num_tokens: number of tokens before the next one, at least 1.
    """

    num_tokens: int

    @classmethod
    def of_window(cls, window: int) -> Reach:
        """Return the reach of layers whose queries see `window` tokens, their own included.

        A window of one token does not include earlier tokens, but the block that is being written is still needed.

        >>> Reach.of_window(512).first_token(600)
        89
        """
        return cls(max(1, window - 1))

    def first_token(self, upto: int) -> int:
        """Return the first token whose part is needed to continue from `upto`."""
        return max(0, upto - self.num_tokens)

    def num_reusable_tokens(self, has_part: npt.NDArray[np.bool_], num_tokens: int, block_size: int) -> int:
        """Find the longest prefix of a prompt from whose end a request can continue.

        Args:
            has_part: bool `[ceil(num_tokens / block_size)]`, whether each block of the prompt has its part.
            num_tokens: tokens that are cached.
            block_size: tokens per block.

        Returns:
            `num_tokens` or fewer; 0 if there is no such prefix.

        Complexity: a pass over `has_part`, and O(1) for each run of blocks without a part.

        >>> Reach(num_tokens=3).num_reusable_tokens(np.array([True, False, True, True]), num_tokens=15, block_size=4)
        15
        >>> Reach(num_tokens=5).num_reusable_tokens(np.array([True, False, False, True]), num_tokens=15, block_size=4)
        4
        """
        end = has_part.size
        while end:
            missing = np.flatnonzero(~has_part[:end])
            start = int(missing[-1]) + 1 if missing.size else 0  # blocks [start, end) have their parts
            upto = min(end * block_size, num_tokens)
            if self.first_token(upto) >= start * block_size:
                return upto
            end = start - 1 if start else 0
        return 0

    def max_parts(self, num_tokens: int, block_size: int) -> int:
        """Return the maximum number of parts that a request of `num_tokens` needs, apart from those that a step writes.

        These are the parts in the window, which begins and ends inside a block; the part that is written next; and the
        part that is copied.
        """
        return min(-(-num_tokens // block_size), -(-self.num_tokens // block_size) + 2) + 1


NO_PART = -1  # table entry of a block without a part


class WindowPool:
    """Allocates parts of blocks for one group of windowed layers, and evicts parts that no lease pins.

        blocks      0     1     2     3     4     5          ids of the block pool, as trees and leases use them
        table       3     -     0     -     -     1          the part of each, if it has one
        parts    [ of 2 | of 5 | free | of 0 ]               memory of these layers, for fewer tokens

    A part is pinned while it is in the window of a running request, and while a held lease or a public prefix keeps it.
    Unpinned parts stay, because another prompt may continue there, and are evicted in the order of a `PartQueue` when
    parts run out.

              pin            unpin_passed, unpin_ends          evicted for another block
        free ──────▶ pinned ◀─────────────────▶ unpinned, in a queue ──────────────▶ pinned
             ◀──────────────────────────────────
                   freed with its block, or evicted so that blocks can use its memory

    With a `PartMemory`, parts and blocks share one memory. A part takes the memory of free blocks, which meanwhile are
    withheld from leases; a lease takes the memory of unpinned parts. `Evictor.make_room` decides what is evicted, and
    respects the bound of `PartShare`. Without a `PartMemory` the number of parts is fixed.

    Reservations prevent deadlocks: all requests together never reserve more parts than the pool has, and the memory of
    reserved parts is always withheld. The parts that outlive their request, those of held leases and public prefixes,
    are at most half of the parts that one request of any length leaves; if the memory is shared, and blocks take any of
    it, the lasting parts take at most the memory of an eighth of the blocks.

    Args:
        num_blocks: blocks of the block pool.
        num_parts: parts of this pool.
        block_size: tokens per block.
        reach: which earlier tokens these layers need.
        step_tokens: maximum number of tokens of a step, all requests together.
        memory: the memory that parts share with blocks; None if they have memory of their own.

    Attributes:
        num_blocks, num_parts, block_size, reach: the arguments.
        share: bounds the parts that requests only passed, if the memory is shared.
        num_withheld_blocks: blocks whose memory is used by parts, or reserved for them.
        table: int32 `[num_blocks]`, the part of each block; `NO_PART` where there is none. Read-only for callers.
        num_step_parts: parts that are set aside for the tokens of a step.
        num_reserved: parts that are reserved for requests, and for leases that outlive them.
        num_lasting: reserved parts that outlive their request.
        max_lasting: maximum of `num_lasting`.
        num_evicted: parts evicted so far.

    Raises:
        InvariantViolation: there are too few parts for a single request.
    """

    def __init__(
        self,
        num_blocks: int,
        num_parts: int,
        block_size: int,
        reach: Reach,
        step_tokens: int,
        memory: PartMemory | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_parts = num_parts
        self.block_size = block_size
        self.reach = reach
        self.num_step_parts = -(-step_tokens // block_size)
        min_num_parts = min_parts(reach, block_size, step_tokens)
        require_invariant("parts", num_parts >= min_num_parts, f"expected at least {min_num_parts}, got {num_parts}")
        self.table: npt.NDArray[np.int32] = np.full(num_blocks, NO_PART, dtype=np.int32)
        self.num_reserved = 0
        self.num_lasting = 0
        self.max_lasting = (num_parts - min_num_parts) // 2
        if memory is not None:
            max_bytes = num_blocks * memory.block_bytes // 8 if memory.block_bytes else num_parts * memory.part_bytes
            self.max_lasting = min(self.max_lasting, max_bytes // memory.part_bytes)
        self.num_evicted = 0
        self.num_withheld_blocks = 0
        self.share = None if memory is None else PartShare(num_blocks, block_size, memory)
        self._memory = memory
        self._blocks: BlockPool | None = None
        self._free = list(range(num_parts - 1, -1, -1))
        self._needs: Counter[int] = Counter()  # by block: leases that pin its part
        self._unpinned = PartQueue(num_blocks, -(-reach.num_tokens // block_size))

    def connect(self, blocks: BlockPool) -> None:
        """Share the memory with this block pool, if there is a `PartMemory`. Call it once, before any other method."""
        self._blocks = blocks
        self._withhold()

    @property
    def num_free(self) -> int:
        """Parts without a block."""
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        """Parts that open leases pin."""
        return len(self._needs)

    @property
    def num_unpinned(self) -> int:
        """Parts that no lease pins."""
        return len(self._unpinned)

    @property
    def num_passed(self) -> int:
        """Unpinned parts that requests only passed."""
        return self._unpinned.num_passed

    @property
    def has_excess(self) -> bool:
        """Whether there are more passed parts than `share` allows while blocks are evicted."""
        return self.share is not None and self.num_passed > self.share.max_parts

    @property
    def blocks_per_part(self) -> float:
        """Blocks that fit into the memory of a part; 0 if blocks and parts share no memory."""
        memory = self._memory
        return memory.part_bytes / memory.block_bytes if memory is not None and memory.block_bytes else 0.0

    def num_reserved_blocks(self, num_more_parts: int = 0) -> int:
        """Return how many blocks are withheld for reserved parts if `num_more_parts` more parts are reserved."""
        return self._num_blocks(self.num_reserved + num_more_parts + self.num_step_parts)

    def num_lacking_blocks(self, num_new_blocks: int, num_free_blocks: int) -> int:
        """Return how many blocks to evict so that the parts of new blocks can stay, as far as `share` allows.

        Args:
            num_new_blocks: blocks that a lease allocates now, and will compute.
            num_free_blocks: further blocks that are free.
        """
        if self.share is None:
            return 0
        num_used = self.num_parts - self.num_free + max(0, min(num_new_blocks, self.share.max_parts - self.num_passed))
        num_blocks = self._num_blocks(num_used) - self.num_withheld_blocks - num_free_blocks
        return max(num_blocks, num_used - self.num_parts)

    def require_room(self, num_parts: int, *, lasts: bool = False) -> None:
        """Raise if a request may not reserve `num_parts` parts now.

        Args:
            num_parts: parts to reserve.
            lasts: whether they will outlive the request.

        Raises:
            OutOfBlocks: other requests have reserved too many, or too many would outlive their requests.
        """
        if lasts:
            self.require_lasting_room(num_parts)
        num_reservable_parts = self.num_parts - self.num_step_parts - self.num_reserved
        if num_parts > num_reservable_parts:
            raise OutOfBlocks(  # without the parts that other tenants have
                f"parts of windowed layers: expected room for {num_parts} blocks more of {self.num_parts}, got less, "
                "since running requests and public prefixes may need the others"
            )

    def require_lasting_room(self, num_parts: int) -> None:
        """Raise if `num_parts` parts may not outlive their request.

        Raises:
            OutOfBlocks: there would be too many.
        """
        if not self.may_last(num_parts):
            raise OutOfBlocks(
                f"parts of windowed layers: expected at most {self.max_lasting} that outlive their requests, got more "
                f"with the {num_parts} of this one"
            )

    def may_last(self, num_parts: int) -> bool:
        """Whether `num_parts` more parts may outlive their request."""
        return self.num_lasting + num_parts <= self.max_lasting

    def reserve(self, num_parts: int) -> None:
        """Reserve parts for a request; a negative number returns reserved parts.

        Before that, call `require_room`, and make room for the blocks of `num_reserved_blocks`.
        """
        self.num_reserved += num_parts
        self._withhold()

    def num_reusable_tokens(self, block_ids: BlockIds, num_tokens: int) -> int:
        """Find how much of a cached prompt can be reused; see `Reach.num_reusable_tokens`.

        Args:
            block_ids: int32, the blocks of at least `num_tokens` tokens.
            num_tokens: tokens that are cached.
        """
        prompt_block_ids = block_ids[: -(-num_tokens // self.block_size)]
        return self.reach.num_reusable_tokens(self.table[prompt_block_ids] != NO_PART, num_tokens, self.block_size)

    def part_of(self, block_id: int) -> int:
        """Return the part of a block; `NO_PART` if the block has none."""
        return int(self.table[block_id])

    def pin(self, block_ids: Iterable[int]) -> None:
        """Pin the parts of blocks for one more request; allocate parts for blocks that have none.

        Raises:
            InvariantViolation: other requests have pinned all parts, more than they have reserved.
        """
        for block_id in block_ids:
            if not self._needs[block_id]:
                if self.table[block_id] == NO_PART:
                    self.table[block_id] = self._take_part()
                else:
                    self._unpinned.remove(block_id)
            self._needs[block_id] += 1

    def unpin_ends(self, block_ids: Iterable[int]) -> None:
        """Unpin the parts of blocks at which a request, or its hit, ended."""
        for block_id in block_ids:
            if self._unpin(block_id):
                self._unpinned.add_end(block_id)

    def unpin_passed(self, positions: Mapping[int, int], num_blocks: int) -> None:
        """Unpin the parts of blocks that a request has passed.

        Args:
            positions: position of each block in the prompt, counted in blocks, by block id.
            num_blocks: blocks of the prompt.
        """
        for block_id, position in positions.items():
            if self._unpin(block_id):
                self._unpinned.add_passed(block_id, position, num_blocks)

    def _unpin(self, block_id: int) -> bool:
        """Unpin a part for one request. Returns whether no other request needs it."""
        self._needs[block_id] -= 1
        if self._needs[block_id]:
            return False
        del self._needs[block_id]
        return True

    def touch(self, block_ids: BlockIds) -> None:
        """Record a use of a prompt with these blocks, so that its parts are evicted later."""
        self._unpinned.touch(block_ids)

    def exchange(self, old: int, new: int) -> bool:
        """Replace a block by another one with the same content, because a tree had it first.

        If only the old block has a part, the new block takes it over. Otherwise the part is freed with the old block.

        Args:
            old: a block that one request has, and will release.
            new: the block of the tree.

        Returns:
            Whether the part of the old block was pinned. If so, the part of the new block is pinned now.
        """
        was_needed = old in self._needs
        if self.table[old] != NO_PART and self.table[new] == NO_PART:
            self.table[new], self.table[old] = self.table[old], NO_PART
            if was_needed:
                self._needs[new] = self._needs.pop(old)
            else:
                self._unpinned.move(old, new)
        elif was_needed:
            self.pin([new])
            self.unpin_passed({old: 0}, 0)
        return was_needed

    def free_parts(self, block_ids: BlockIds) -> None:
        """Free the parts of blocks that are free now. Complexity: O(len), with a loop over blocks that have parts.

        Raises:
            InvariantViolation: a request has pinned one of them.
        """
        for block_id in block_ids[self.table[block_ids] != NO_PART].tolist():
            if block_id in self._needs:
                raise InvariantViolation("windowed layers: a block was freed whose part is pinned")
            self._unpinned.remove(block_id)
            self._free.append(int(self.table[block_id]))
            self.table[block_id] = NO_PART
        self._withhold()

    def evict_part(self) -> bool:
        """Evict an unpinned part, so that blocks can use its memory.

        Returns:
            Whether a part was evicted. False if all are pinned, or if blocks could not use the memory of another part,
            because it is reserved.
        """
        if not self._unpinned or self.num_withheld_blocks <= self.num_reserved_blocks():
            return False
        self._free.append(self._evict())
        self._withhold()
        return True

    def _take_part(self) -> int:
        if not self._free:
            return self._evict()
        num_more_blocks = self._num_blocks(self.num_parts - self.num_free + 1) - self.num_withheld_blocks
        if self._blocks is not None and num_more_blocks > 0:
            if num_more_blocks > self._blocks.num_free:
                return self._evict()
            self._blocks.withhold(num_more_blocks)
            self.num_withheld_blocks += num_more_blocks
        return self._free.pop()

    def _evict(self) -> int:
        """Evict the first part of the queue. Returns the part."""
        block_id = self._unpinned.pop()
        if block_id is None:
            raise InvariantViolation(f"parts: expected one that no request needs, got {self.num_parts} needed ones")
        part = int(self.table[block_id])
        self.table[block_id] = NO_PART
        self.num_evicted += 1
        return part

    def _num_blocks(self, num_parts: int) -> int:
        return 0 if self._memory is None else self._memory.num_blocks(num_parts)

    def _withhold(self) -> None:
        """Withhold the blocks whose memory is needed for parts that are used or reserved."""
        if self._blocks is not None and self._memory is not None:
            num_blocks = max(self._num_blocks(self.num_parts - self.num_free), self.num_reserved_blocks())
            self._blocks.withhold(num_blocks - self.num_withheld_blocks)
            self.num_withheld_blocks = num_blocks

    def check(self, needs: Counter[int], num_reserved: int, free_blocks: BlockIds) -> None:
        """Compare everything with what the caller has counted.

        Args:
            needs: number of leases by block.
            num_reserved: parts that leases have reserved.
            free_blocks: blocks without an owner.

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        with_part = np.flatnonzero(self.table != NO_PART)
        parts = sorted([*self._free, *self.table[with_part].tolist()])
        require_invariant(
            "parts", parts == list(range(self.num_parts)), "a part is lost, or two blocks have the same part"
        )
        require_invariant("parts", self._needs == needs, "the needed parts are not those of the window leases")
        require_invariant("parts", min(self._needs.values(), default=1) > 0, "a block without leases counts as pinned")
        queued = list(self._unpinned)
        require_invariant("parts", len(set(queued)) == len(queued), "a block is queued twice")
        owners = sorted([*self._needs, *queued])
        require_invariant("parts", owners == with_part.tolist(), "a part is neither needed nor queued")
        require_invariant("parts", bool((self.table[free_blocks] == NO_PART).all()), "a free block has a part")
        require_invariant("parts", self.num_reserved == num_reserved, "the reservations are not those of window leases")
        is_bounded = num_reserved + self.num_step_parts <= self.num_parts
        require_invariant("parts", is_bounded, "more parts are reserved than there are")
        num_blocks = max(self._num_blocks(len(with_part)), self.num_reserved_blocks())
        require_invariant("parts", self.num_withheld_blocks == num_blocks, "the withheld blocks are miscounted")


def min_parts(reach: Reach, block_size: int, step_tokens: int) -> int:
    """Return the number of parts with which a request of any length can run alone.

    >>> min_parts(Reach.of_window(512), block_size=64, step_tokens=2048)
    43
    """
    return reach.max_parts(2**62, block_size) + -(-step_tokens // block_size)
