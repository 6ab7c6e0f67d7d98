"""Copies evicted blocks, and passes the copies to the tiers."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.offload.copies import BlockCopier
from radixkv.offload.deleter import Deleter
from radixkv.offload.disk_record import DiskRecord
from radixkv.offload.index.offload_index import EvictedBlock, OffloadIndex
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import PutOutcome, PutResult
from radixkv.offload.tiers.tier import Tier

_log = logging.getLogger(__name__)


class _Save(NamedTuple):
    """A batch for a tier: the tier's name, the keys of the blocks, and the keys to evict first if it needs space."""

    name: str
    keys: Sequence[bytes]
    victims: Sequence[bytes]


class EvictedCopies(NamedTuple):
    """Copies of evicted blocks.

    Attributes:
        blocks: the evicted blocks, each with its copy.
        victims: the keys that each tier evicts first if it needs space for them, in order.
        wait: blocks until the copies are complete.
    """

    blocks: Sequence[tuple[EvictedBlock, memoryview]]
    victims: Mapping[str, Sequence[bytes]]
    wait: Callable[[], None] = lambda: None


class Saver:
    """Saves evicted blocks before their memory is reused.

    The copies that wait to be stored are bounded. Blocks beyond the bound are dropped.

    Args:
        offload_index: queues evicted blocks, and is notified of the results.
        tiers: the tiers by name.
        deleter: deletes blocks that tiers should not hold.
        mover: copies blocks.
        max_bytes: bound of copies that wait.
        record: records the namespaces of blocks on the tier `disk`; None without a disk.

    Attributes:
        num_dropped_blocks: blocks that were dropped because too many copies waited, or because there was no memory for
            copies, by tier.
        max_waiting_blocks: the bound in blocks. A block counts once for each tier that stores it.
    """

    def __init__(
        self,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        deleter: Deleter,
        mover: BlockCopier,
        max_bytes: int,
        record: DiskRecord | None = None,
    ) -> None:
        self.num_dropped_blocks: Counter[str] = Counter()
        self._index = offload_index
        self._tiers = tiers
        self._deleter = deleter
        self._mover = mover
        self._record = record
        self.max_waiting_blocks = max_bytes // mover.payload_bytes
        self._num_free_blocks = self.max_waiting_blocks
        # Calls whose results were not processed yet.
        self._in_flight: dict[Future[PutResult | None], _Save] = {}
        self._ended: queue.SimpleQueue[Future[PutResult | None]] = queue.SimpleQueue()

    @property
    def has_waiting(self) -> bool:
        """Whether saves are in flight, or their results were not processed yet."""
        return bool(self._in_flight)

    def victims(self, name: str) -> list[bytes]:
        """List the keys that a tier was asked to evict in saves that are in flight. Complexity: O(these keys)."""
        return [key for save in self._in_flight.values() if save.name == name for key in save.victims]

    def flush(self) -> None:
        """Copy and save evicted blocks."""
        self.save(self.copy())

    def copy(self) -> EvictedCopies:
        """Copy evicted blocks. Call this before blocks are written; no block may be evicted until `save`.

        On a GPU this only launches the copies, in order with the steps. The threads of the stores wait for them.
        """
        self.note_ended()
        queued, victims = self._index.take_evicted_blocks()
        evicted_blocks = self._within_bound(queued)
        if not evicted_blocks:
            return EvictedCopies([], victims)
        try:
            read = self._mover.read(
                [each.block_id for each in evicted_blocks], [each.part_id for each in evicted_blocks]
            )
        except MemoryError as error:
            _log.warning(
                "no memory to copy %d evicted blocks for the tiers, so they are lost: %s", len(evicted_blocks), error
            )
            self._drop(evicted_blocks)
            return EvictedCopies([], victims)
        return EvictedCopies(list(zip(evicted_blocks, read.payloads, strict=True)), victims, read.copy.wait)

    def save(self, copies: EvictedCopies) -> None:
        """Pass copies to the tiers, without waiting for them."""
        for name, tier in self._tiers.items():
            victims = copies.victims[name]
            tier_copies = [(each, payload) for each, payload in copies.blocks if name in each.tiers]
            if not tier_copies and not victims:
                continue
            if name == "disk" and self._record is not None:
                for namespace in {each.block.namespace for each, _ in tier_copies}:
                    self._record.note(namespace)
            objects = [_object(each, payload, tier, copies.wait) for each, payload in tier_copies]
            self._num_free_blocks -= len(objects)
            saved = tier.save(objects, victims)
            self._in_flight[saved] = _Save(name, [each.key for each in objects], victims)
            saved.add_done_callback(self._ended.put)

    def note_ended(self) -> None:
        """Process the results of finished saves."""
        while not self._ended.empty():
            self._note_end(self._ended.get())

    def wait(self, limit_s: float) -> bool:
        """Wait until all saves are finished. Returns whether they finished within the limit."""
        deadline_s = time.monotonic() + limit_s
        while self.has_waiting:
            try:
                self._note_end(self._ended.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                return False
        return True

    def _within_bound(self, evicted_blocks: Sequence[EvictedBlock]) -> Sequence[EvictedBlock]:
        """Drop the blocks that exceed the bound: those evicted first, since prompts are evicted from their end."""
        num_free_blocks = self._num_free_blocks
        first = len(evicted_blocks)
        while first and len(evicted_blocks[first - 1].tiers) <= num_free_blocks:
            first -= 1
            num_free_blocks -= len(evicted_blocks[first].tiers)
        if first:
            self._drop(evicted_blocks[:first])
        return evicted_blocks[first:]

    def _drop(self, evicted_blocks: Sequence[EvictedBlock]) -> None:
        for name, tier_index in self._index.tiers.items():
            keys = [each.block.key for each in evicted_blocks if name in each.tiers]
            older = [key for key in keys if tier_index.may_have(key)]  # the tier may hold them without their parts
            self.num_dropped_blocks[name] += len(keys)
            self._index.lost(name, keys)
            self._delete(name, older)

    def _note_end(self, saved: Future[PutResult | None]) -> None:
        name, keys, victims = self._in_flight.pop(saved)
        result = None if saved.cancelled() else saved.result()
        self._num_free_blocks += len(keys)
        if result is None:  # the call may still store them later
            self._index.lost(name, keys)
            self._delete(name, (*keys, *victims))
            return
        outcomes = list(zip(keys, result.outcomes, strict=True))
        successes = (PutOutcome.STORED, PutOutcome.ALREADY_THERE)
        refused = [key for key, outcome in outcomes if outcome not in successes]
        unsent = {key for key, outcome in outcomes if outcome is PutOutcome.NOT_SENT}
        never_there = {key for key in unsent if not self._index.tiers[name].may_have(key)}
        self._index.stored(name, [key for key, outcome in outcomes if outcome in successes])
        # If an evicted key is pending, the device has evicted the block again, and a later save stores it.
        evicted = filter(self._index.tiers[name].holds, result.evicted)
        self._index.lost(name, [*refused, *evicted])
        # The tier certainly lacks blocks that were never there, and evicted blocks that this call did not store again.
        # It may hold any other victim: its store did not need the space.
        gone = (set(result.evicted) - set(keys)) | never_there
        self._delete(name, [key for key in (*keys, *victims) if key not in gone])

    def _delete(self, name: str, keys: Sequence[bytes]) -> None:
        """Delete blocks that a tier should not hold. A shared store may keep what it stored late."""
        if keys and not self._index.tiers[name].is_shared:
            self._deleter.delete_unknown(name, keys)


def _object(evicted: EvictedBlock, payload: memoryview, tier: Tier, wait: Callable[[], None]) -> BlockObject:
    block = evicted.block
    generation = int(evicted.part_id is not None)  # an object with its part replaces one without
    protection = tier.protection_of(block.namespace.tenant)
    return BlockObject(block.key, block.parent, generation, block.tokens, payload, protection, wait)
