"""The slots for states: which block has a snapshot, and who goes on from it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from radixkv.api.stats import StateStats
from radixkv.blocks import BlockIds
from radixkv.cache.states.state_lease import StateLease
from radixkv.cache.states.worth import WorthOrder
from radixkv.errors import require_invariant

_NO_SLOT = -1  # in the table, which is searched as a whole


class StateSlots:
    """Hands out slots for states, and keeps snapshots: states at the ends of some cached blocks.

        tokens      [ block 5 )[ block 9 )[ block 2 )[ block 7 )     a path of the tree
        table           -          3          -          0           slots of the snapshots, by block
        slots       [ of 7 | own of a request | free | of 9 | pending ]

                 take                publish                 block freed, or worth least
        free ───────────▶ pending ─────────────▶ snapshot ────────────────────────────────▶ free
          └──── open ───▶ own of a request ── close ──▶ free

    A snapshot belongs to its block: it goes with it, and is found by those that find the block. A slot that a request
    still has to read is freed after that.

    Args:
        num_blocks: blocks of the block pool.
        block_size: tokens a block.
        num_requests: requests that may run at the same time; each has a slot of its own.
        num_snapshots: snapshots that may be kept beside them.
        every_tokens: tokens between snapshots of a long prompt; rounded down to whole blocks, at least one.

    Attributes:
        block_size, num_snapshots, every_tokens: as above.
        table: int32 `[num_blocks]`, the slot of each block's snapshot; -1 where there is none. Read-only for others.
        num_given_up: snapshots that were given up for others so far.
        num_recomputed_tokens: cached tokens that were computed again so far, since no snapshot was that far.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_requests: int, num_snapshots: int, every_tokens: int
    ) -> None:
        self.block_size = block_size
        self.num_snapshots = num_snapshots
        self.every_tokens = max(1, every_tokens // block_size) * block_size
        self.table: npt.NDArray[np.int32] = np.full(num_blocks, _NO_SLOT, dtype=np.int32)
        self.num_given_up = 0
        self.num_recomputed_tokens = 0
        self.num_slots = num_requests + num_snapshots
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._leases: set[StateLease] = set()  # of the running requests
        self._num_pending = 0
        self._blocks: dict[int, int] = {}  # of snapshots, by slot
        self._readers: Counter[int] = Counter()  # requests that have not read a slot yet
        self._doomed: set[int] = set()  # slots without a block that somebody still reads
        self._order = WorthOrder()

    @property
    def num_kept(self) -> int:
        """Snapshots that belong to blocks now."""
        return len(self._blocks)

    def stats(self) -> StateStats:
        """Count the snapshots. Complexity: O(1)."""
        return StateStats(self.num_kept, self.num_snapshots, self.num_given_up, self.num_recomputed_tokens)

    def longest(self, block_ids: BlockIds, num_tokens: int) -> int:
        """Find how much of a cached prompt can be reused.

        Args:
            block_ids: int32, the blocks of at least `num_tokens` tokens.
            num_tokens: tokens that are cached.

        Returns:
            The end of the last whole block that has a snapshot; 0 if there is none.

        Complexity: a pass over the blocks.
        """
        with_snapshot = np.flatnonzero(self.table[block_ids[: num_tokens // self.block_size]] != _NO_SLOT)
        return (int(with_snapshot[-1]) + 1) * self.block_size if with_snapshot.size else 0

    def open(self, block_ids: BlockIds, cached_tokens: int, num_prompt_tokens: int, found_tokens: int) -> StateLease:
        """Give a request a slot of its own, and let it go on from a snapshot.

        Args:
            block_ids: int32, its blocks.
            cached_tokens: tokens that it reuses, as `longest` says.
            num_prompt_tokens: length of its prompt.
            found_tokens: tokens at its start that are cached, whether or not one can go on there.

        Returns:
            A lease that the caller must close.
        """
        num_requests = self.num_slots - self.num_snapshots
        require_invariant("states", len(self._leases) < num_requests, "more requests run than there are slots for")
        source = None
        if cached_tokens:
            source = int(self.table[block_ids[cached_tokens // self.block_size - 1]])
            require_invariant("states", source != _NO_SLOT, "a request goes on where no snapshot is")
            self._order.used(source)
            self._readers[source] += 1
        self.num_recomputed_tokens += max(0, found_tokens // self.block_size * self.block_size - cached_tokens)
        slot = self._free.pop()
        lease = StateLease(self, slot, source, cached_tokens, num_prompt_tokens, found_tokens)
        self._leases.add(lease)
        return lease

    def close(self, lease: StateLease) -> None:
        """Take the own slot of a request back."""
        self._leases.remove(lease)
        self._free.append(lease.slot)

    def read(self, slot: int) -> None:
        """Note that a request has read the snapshot that it goes on from, or never will."""
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._doomed:
                self._doomed.remove(slot)
                self._free.append(slot)

    def take(self, saved_tokens: int) -> int | None:
        """Take a slot for a snapshot, if need be from the one that is worth least.

        Args:
            saved_tokens: tokens that it saves beside the snapshot before it.

        Returns:
            The slot, pending; None if all others are worth more, or are read.
        """
        if len(self._blocks) + self._num_pending + len(self._doomed) >= self.num_snapshots:
            least = self._order.least()
            if least is None or least in self._readers or self._order.worth(least) > self._order.worth_of(saved_tokens):
                return None
            self._order.give_up(least)
            self.num_given_up += 1
            self._leave(least)
        self._num_pending += 1
        return self._free.pop()

    def drop(self, slot: int) -> None:
        """Take a pending slot back."""
        self._num_pending -= 1
        self._free.append(slot)

    def publish(self, slot: int, block_id: int, saved_tokens: int) -> bool:
        """Let a pending slot be the snapshot of a block that a tree holds. Returns False if it has one already."""
        if self.table[block_id] != _NO_SLOT:
            self.drop(slot)
            return False
        self._num_pending -= 1
        self.table[block_id] = slot
        self._blocks[slot] = block_id
        self._order.add(slot, saved_tokens)
        return True

    def retract(self, slot: int, block_id: int) -> None:
        """Free the snapshot of a block, unless it was used or is gone."""
        if self._blocks.get(slot) == block_id and not self._order.num_uses(slot):
            self._order.discard(slot)
            self._leave(slot)

    def freed(self, block_ids: BlockIds) -> None:
        """Free the snapshots of blocks that nobody owns any more. Complexity: O(len), a loop over those with one."""
        for slot in self.table[block_ids[self.table[block_ids] != _NO_SLOT]].tolist():
            self._order.discard(slot)
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Take a snapshot from its block."""
        self.table[self._blocks.pop(slot)] = _NO_SLOT
        if slot in self._readers:
            self._doomed.add(slot)
        else:
            self._free.append(slot)

    def check(self, free_blocks: BlockIds) -> None:
        """Recount all slots.

        Args:
            free_blocks: blocks that nobody owns.

        Raises:
            InvariantViolation: the message says what does not agree.
        """
        own = [lease.slot for lease in self._leases]
        pending = [slot for lease in self._leases for slot in lease.pending_slots]
        slots = sorted([*self._free, *own, *pending, *self._blocks, *self._doomed])
        require_invariant("states", slots == list(range(self.num_slots)), "a slot is lost, or two have it")
        require_invariant("states", self._num_pending == len(pending), "the number of pending slots drifted")
        blocks = np.flatnonzero(self.table != _NO_SLOT)
        table = dict(zip(self.table[blocks].tolist(), blocks.tolist(), strict=True))
        require_invariant("states", table == self._blocks, "the table is not that of the snapshots")
        require_invariant("states", len(self._order) == len(table), "the order is not that of the snapshots")
        read = ((lease.source, lease.slot) for lease in self._leases)
        readers = Counter(source for source, slot in read if source is not None and source != slot)
        require_invariant("states", self._readers == readers, "the readers are not those of the requests")
        require_invariant("states", self._doomed <= set(readers), "a slot is kept that nobody reads")
        num_used = len(table) + len(pending) + len(self._doomed)
        require_invariant("states", num_used <= self.num_snapshots, "more snapshots are kept than may be")
        require_invariant("states", bool((self.table[free_blocks] == _NO_SLOT).all()), "a free block has one")
