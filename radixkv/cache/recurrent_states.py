"""Recurrent states: the slots of running requests, and snapshots at the ends of cached blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.api.stats import StateStats
from radixkv.blocks import BlockIds
from radixkv.errors import require_invariant


@dataclass(slots=True)
class _SnapshotEntry:
    """What the order knows of one snapshot."""

    saved_tokens: int
    num_uses: int
    score: float


class SnapshotOrder:
    """The order in which snapshots are evicted: by the tokens that they save, and by how recently they were used.

    The score of a snapshot is (tokens since the previous snapshot) x (1 + number of uses) + (score of the snapshot that
    was evicted last). So old scores lose their weight over time (GreedyDual-Size with Frequency; Cherkasova,
    HPL-98-69R1). All snapshots have the same size, so scores need not be divided by it.

    Attributes:
        level: the score of the snapshot that was evicted last.

    Example:
        >>> order = SnapshotOrder()
        >>> order.add(7, saved_tokens=512)
        >>> order.add(8, saved_tokens=64)
        >>> order.lowest(), order.new_score(100) > order.score(8)
        (8, True)
        >>> order.record_use(8)
        >>> order.score(8)
        128.0
    """

    def __init__(self) -> None:
        self.level = 0.0
        self._entries: dict[int, _SnapshotEntry] = {}
        self._heap: list[tuple[float, int]] = []  # outdated entries are skipped

    def __len__(self) -> int:
        return len(self._entries)

    def new_score(self, saved_tokens: int) -> float:
        """Return the score of a new snapshot."""
        return self.level + saved_tokens

    def score(self, slot: int) -> float:
        """Return the score of a snapshot."""
        return self._entries[slot].score

    def num_uses(self, slot: int) -> int:
        """Return how often a snapshot was used."""
        return self._entries[slot].num_uses

    def add(self, slot: int, saved_tokens: int) -> None:
        """Add a snapshot. Complexity: O(log snapshots), amortized."""
        self._entries[slot] = entry = _SnapshotEntry(saved_tokens, 0, self.new_score(saved_tokens))
        self._push(slot, entry)

    def record_use(self, slot: int) -> None:
        """Record a use of a snapshot. Complexity: O(log snapshots), amortized."""
        entry = self._entries[slot]
        entry.num_uses += 1
        entry.score = self.level + entry.saved_tokens * (1 + entry.num_uses)
        self._push(slot, entry)

    def discard(self, slot: int) -> None:
        """Forget a snapshot. Complexity: O(1)."""
        del self._entries[slot]

    def lowest(self) -> int | None:
        """Return the snapshot with the lowest score; None if there is none. Complexity: O(log snapshots), amortized."""
        while self._heap:
            score, slot = self._heap[0]
            entry = self._entries.get(slot)
            if entry is not None and entry.score == score:
                return slot
            heapq.heappop(self._heap)
        return None

    def evict(self, slot: int) -> None:
        """Evict a snapshot. Complexity: O(1)."""
        self.level = max(self.level, self._entries[slot].score)
        self.discard(slot)

    def _push(self, slot: int, entry: _SnapshotEntry) -> None:
        """Add the present score of a snapshot to the heap, and rebuild the heap if many entries are outdated."""
        heapq.heappush(self._heap, (entry.score, slot))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(each.score, entry_slot) for entry_slot, each in self._entries.items()]
            heapq.heapify(self._heap)


class _PendingSnapshot(NamedTuple):
    """A snapshot that is not published yet: its slot, and the tokens since the previous snapshot."""

    slot: int
    saved_tokens: int


class _NewestSnapshot(NamedTuple):
    """The newest snapshot of a completion: its slot and its block."""

    slot: int
    block_id: int


class StateLease:
    """Holds the slot of a running request, and the slots of snapshots that it has not published yet.

        prompt    [ cached | every_tokens ....)[ every_tokens ....)[ .... )( completion ........
        source             ^ a snapshot of the tree; afterwards its own slot
        writes                                ^                   ^ ^             ^ the newest block end
                            where it diverges from a cached path ─┘ └─ the end of its last whole block

    The last token of a prompt is always computed, so the last snapshot of a prompt is before its last token.

    Attributes:
        slot: its own slot, which holds its state after each step.
        source: the slot that the first step after the last `advance` reads; None at the beginning of a sequence.
    """

    def __init__(
        self,
        slots: StateSlots,
        slot: int,
        source: int | None,
        cached_tokens: int,
        num_prompt_tokens: int,
        found_tokens: int,
    ) -> None:
        self.slot = slot
        self.source = source
        self._slots = slots
        self._computed_upto = self._last_kept_position = cached_tokens
        self._num_prompt_tokens = num_prompt_tokens
        size = slots.block_size
        whole_tokens = (num_prompt_tokens - 1) // size * size
        self._requested = {whole_tokens, min(found_tokens // size * size, whole_tokens)}
        self._pending: dict[int, _PendingSnapshot] = {}  # by position
        self._last_of_completion: _NewestSnapshot | None = None
        self._is_closed = False

    @property
    def computed_upto(self) -> int:
        """Tokens that the state summarizes."""
        return self._computed_upto

    @property
    def pending_slots(self) -> list[int]:
        """Slots of snapshots that are not published yet."""
        return [each.slot for each in self._pending.values()]

    def request_snapshot(self, position: int) -> bool:
        """Request a snapshot at the end of a block, because another request waits to continue there.

        Returns:
            Whether the pool keeps snapshots.
        """
        self._requested.add(position)
        return self._slots.num_snapshots > 0

    def writes(self, start: int, end: int, *, keeps: bool) -> list[tuple[int, int]]:
        """Allocate slots for the snapshots of a step that computes the tokens `[start, end)`.

        Args:
            start, end: the tokens.
            keeps: whether the request may publish; if not, no snapshots are saved.

        Returns:
            The positions at which states are saved, and their slots. The last one is the request's own slot.
        """
        positions = self._positions(start, end) if keeps else []
        for position in positions:
            if position not in self._pending:
                saved_tokens = position - self._last_kept_position
                slot = self._slots.take(saved_tokens)
                if slot is None:
                    continue
                self._pending[position] = _PendingSnapshot(slot, saved_tokens)
            if position <= self._num_prompt_tokens:
                self._last_kept_position = position
        kept = [(position, self._pending[position].slot) for position in positions if position in self._pending]
        return [*kept, (end, self.slot)]

    def _positions(self, start: int, end: int) -> list[int]:
        """List the ends of blocks after `start`, up to `end`, where snapshots are saved."""
        size, every = self._slots.block_size, self._slots.every_tokens
        upto = min(end, self._num_prompt_tokens - 1)
        positions = {*range((start // every + 1) * every, upto + 1, every)}
        positions |= {position for position in (*self._requested, *self._pending) if start < position <= end}
        newest = end // size * size
        if newest > max(start, self._num_prompt_tokens - 1):
            positions.add(newest)
        return sorted(positions)

    def advance(self, upto: int) -> None:
        """Record that the tokens before `upto` are computed. The request continues from its own slot."""
        self._release_source()
        self.source = self.slot
        self._computed_upto = upto

    def publish(self, block_ids: BlockIds, num_published_blocks: int) -> None:
        """Publish the snapshots at the ends of blocks that are published now.

        Args:
            block_ids: int32, the blocks of the request.
            num_published_blocks: number of published blocks at the beginning.
        """
        upto = min(num_published_blocks * self._slots.block_size, self._computed_upto)
        for position in sorted(each for each in self._pending if each <= upto):
            slot, saved_tokens = self._pending.pop(position)
            block_id = int(block_ids[position // self._slots.block_size - 1])
            if self._slots.publish(slot, block_id, saved_tokens) and position >= self._num_prompt_tokens:
                if self._last_of_completion is not None:
                    self._slots.retract(*self._last_of_completion)
                self._last_of_completion = _NewestSnapshot(slot, block_id)

    def close(self) -> None:
        """Return all slots; published snapshots stay. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._release_source()
        for slot in self.pending_slots:
            self._slots.drop(slot)
        self._pending.clear()
        self._slots.close(self)

    def _release_source(self) -> None:
        """Let the snapshot be freed from which the request continues, if the request has not read it yet."""
        if self.source is not None and self.source != self.slot:
            self._slots.read(self.source)
            self.source = None


_NO_SLOT = -1  # table entry of a block without a snapshot


class StateSlots:
    """Allocates slots for states, and keeps snapshots: states at the ends of some cached blocks.

        tokens      [ block 5 )[ block 9 )[ block 2 )[ block 7 )     a path of the tree
        table           -          3          -          0           slots of the snapshots, by block
        slots       [ of 7 | of a request | free | of 9 | pending ]

                 take                publish                 block freed, or evicted
        free ───────────▶ pending ─────────────▶ snapshot ────────────────────────────────▶ free
          └──── open ───▶ slot of a request ── close ──▶ free

    A snapshot belongs to its block: it is found with the block and freed with it. If a request still has to read the
    slot, the slot is freed afterwards.

    Args:
        num_blocks: blocks of the block pool.
        block_size: tokens per block.
        num_requests: requests that may run at the same time; each has a slot of its own.
        num_snapshots: maximum number of snapshots, in addition to these slots.
        every_tokens: tokens between snapshots of a long prompt; rounded down to whole blocks, at least one.

    Attributes:
        block_size, num_snapshots, every_tokens: the arguments.
        table: int32 `[num_blocks]`, the slot of each block's snapshot; -1 where there is none. Read-only for callers.
        num_evicted: snapshots evicted so far.
        num_recomputed_tokens: cached tokens that were computed again so far, because the last snapshot was before them.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_requests: int, num_snapshots: int, every_tokens: int
    ) -> None:
        self.block_size = block_size
        self.num_snapshots = num_snapshots
        self.every_tokens = max(1, every_tokens // block_size) * block_size
        self.table: npt.NDArray[np.int32] = np.full(num_blocks, _NO_SLOT, dtype=np.int32)
        self.num_evicted = 0
        self.num_recomputed_tokens = 0
        self.num_slots = num_requests + num_snapshots
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._leases: set[StateLease] = set()  # of the running requests
        self._num_pending = 0
        self._blocks: dict[int, int] = {}  # of snapshots, by slot
        self._readers: Counter[int] = Counter()  # by slot: requests that have not read it yet
        self._doomed: set[int] = set()  # slots without a block that a request still has to read
        self._order = SnapshotOrder()

    @property
    def num_kept(self) -> int:
        """Number of snapshots."""
        return len(self._blocks)

    def stats(self) -> StateStats:
        """Count the snapshots. Complexity: O(1)."""
        return StateStats(self.num_kept, self.num_snapshots, self.num_evicted, self.num_recomputed_tokens)

    def num_reusable_tokens(self, block_ids: BlockIds, num_tokens: int) -> int:
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
        """Allocate a slot for a request, which continues from a snapshot.

        Args:
            block_ids: int32, its blocks.
            cached_tokens: tokens that it reuses, as returned by `num_reusable_tokens`.
            num_prompt_tokens: length of its prompt.
            found_tokens: tokens at its beginning that are cached, whether or not there is a snapshot.

        Returns:
            A lease that the caller must close.
        """
        num_requests = self.num_slots - self.num_snapshots
        require_invariant("states", len(self._leases) < num_requests, "more requests run than there are slots for")
        source = None
        if cached_tokens:
            source = int(self.table[block_ids[cached_tokens // self.block_size - 1]])
            require_invariant("states", source != _NO_SLOT, "a request continues where there is no snapshot")
            self._order.record_use(source)
            self._readers[source] += 1
        self.num_recomputed_tokens += max(0, found_tokens // self.block_size * self.block_size - cached_tokens)
        slot = self._free.pop()
        lease = StateLease(self, slot, source, cached_tokens, num_prompt_tokens, found_tokens)
        self._leases.add(lease)
        return lease

    def close(self, lease: StateLease) -> None:
        """Free the slot of a request."""
        self._leases.remove(lease)
        self._free.append(lease.slot)

    def read(self, slot: int) -> None:
        """Record that a request has read the snapshot from which it continues, or will never read it."""
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._doomed:
                self._doomed.remove(slot)
                self._free.append(slot)

    def take(self, saved_tokens: int) -> int | None:
        """Allocate a slot for a snapshot, evicting the one with the lowest score if necessary.

        Args:
            saved_tokens: tokens since the previous snapshot.

        Returns:
            The pending slot. None if no slot is free and no snapshot may be evicted: all have a higher score, a request
            still has to read the one with the lowest score, or there are none.
        """
        if len(self._blocks) + self._num_pending + len(self._doomed) >= self.num_snapshots:
            lowest = self._order.lowest()
            if (
                lowest is None
                or lowest in self._readers
                or self._order.score(lowest) > self._order.new_score(saved_tokens)
            ):
                return None
            self._order.evict(lowest)
            self.num_evicted += 1
            self._detach(lowest)
        self._num_pending += 1
        return self._free.pop()

    def drop(self, slot: int) -> None:
        """Free a pending slot."""
        self._num_pending -= 1
        self._free.append(slot)

    def publish(self, slot: int, block_id: int, saved_tokens: int) -> bool:
        """Make a pending slot the snapshot of a published block. If the block has one, free the slot, return False."""
        if self.table[block_id] != _NO_SLOT:
            self.drop(slot)
            return False
        self._num_pending -= 1
        self.table[block_id] = slot
        self._blocks[slot] = block_id
        self._order.add(slot, saved_tokens)
        return True

    def retract(self, slot: int, block_id: int) -> None:
        """Free the snapshot of a block, unless it was used or evicted."""
        if self._blocks.get(slot) == block_id and not self._order.num_uses(slot):
            self._order.discard(slot)
            self._detach(slot)

    def free_snapshots(self, block_ids: BlockIds) -> None:
        """Free the snapshots of blocks that are free now. Complexity: O(len), and a loop over those with snapshots."""
        for slot in self.table[block_ids[self.table[block_ids] != _NO_SLOT]].tolist():
            self._order.discard(slot)
            self._detach(slot)

    def _detach(self, slot: int) -> None:
        """Remove a snapshot from its block."""
        self.table[self._blocks.pop(slot)] = _NO_SLOT
        if slot in self._readers:
            self._doomed.add(slot)
        else:
            self._free.append(slot)

    def check(self, free_blocks: BlockIds) -> None:
        """Recount all slots.

        Args:
            free_blocks: blocks without an owner.

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        own = [lease.slot for lease in self._leases]
        pending = [slot for lease in self._leases for slot in lease.pending_slots]
        slots = sorted([*self._free, *own, *pending, *self._blocks, *self._doomed])
        require_invariant("states", slots == list(range(self.num_slots)), "a slot is lost, or used twice")
        require_invariant("states", self._num_pending == len(pending), "the number of pending slots drifted")
        blocks = np.flatnonzero(self.table != _NO_SLOT)
        table = dict(zip(self.table[blocks].tolist(), blocks.tolist(), strict=True))
        require_invariant("states", table == self._blocks, "the table is not that of the snapshots")
        require_invariant("states", len(self._order) == len(table), "the order is not that of the snapshots")
        read = ((lease.source, lease.slot) for lease in self._leases)
        readers = Counter(source for source, slot in read if source is not None and source != slot)
        require_invariant("states", self._readers == readers, "the readers are not those of the requests")
        require_invariant("states", self._doomed <= set(readers), "a slot is kept that no request reads")
        num_used = len(table) + len(pending) + len(self._doomed)
        require_invariant("states", num_used <= self.num_snapshots, "more snapshots are kept than allowed")
        require_invariant("states", bool((self.table[free_blocks] == _NO_SLOT).all()), "a free block has a snapshot")
