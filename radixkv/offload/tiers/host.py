"""Store in host memory: one allocation, divided into slots of one object."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np

from radixkv.errors import ConfigError
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreBackend, StoreSize
from radixkv.offload.tiers.slot_table import SlotEntry, SlotTable

_ALIGNMENT = 64


def map_memory(num_bytes: int) -> memoryview:
    """Map memory of exactly this size. A page takes memory when it is first written.

    Raises:
        MemoryError: the system does not have enough memory.
    """
    try:
        pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes can't be mapped") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[:num_bytes]


class HostStore(StoreBackend):
    """Objects in host memory. Reads are zero-copy: a loan is a view of the slot.

    Args:
        arena: the memory, for example from `map_memory`; its size is the capacity.
        object_bytes: size of the largest object, see `object_bytes` in `block_object`.
        native: see `BlockObject.write_to`.

    Raises:
        ConfigError: the arena has no room for one object.
    """

    num_readers = 1  # reads do not block; more threads would only contend with writes

    def __init__(self, arena: memoryview, object_bytes: int, native: NativeCopies | None = None) -> None:
        self._slot_bytes = -(-object_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_slots = arena.nbytes // self._slot_bytes
        if not self._num_slots:
            raise ConfigError(f"tiers.host_bytes: expected at least {self._slot_bytes} bytes, got {arena.nbytes}")
        self._arena = np.frombuffer(arena, np.uint8)
        self._native = native
        self._table = SlotTable(self._num_slots)
        # Reentrant, since a loan may be released by garbage collection within a call of the same thread.
        self._lock = threading.RLock()

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Copy objects into slots. Lent slots are not evicted."""
        remaining_victims = iter(victims)
        outcomes = []
        evicted = []
        for each in objects:
            num_bytes = each.num_bytes
            if num_bytes > self._slot_bytes:
                outcomes.append(PutOutcome.TOO_LARGE)
                continue
            with self._lock:
                if self._table.has(each.key, each.generation):
                    outcomes.append(PutOutcome.ALREADY_THERE)
                    continue
                slot, evicted_keys = self._table.claim(each.key, remaining_victims)
            evicted += evicted_keys
            if slot is None:
                outcomes.append(PutOutcome.NO_ROOM)
                continue
            self._write(each, num_bytes, slot)
            outcomes.append(PutOutcome.STORED)
        return PutResult(tuple(outcomes), tuple(evicted))

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Lend slots, which are not reused before their loans are released."""
        with self._lock:
            return [self._lend(entry) if (entry := self._table.find(key)) else None for key in keys]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key. Does not count as a use."""
        with self._lock:
            return [self._table.find(key, is_use=False) is not None for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete objects. A lent slot is freed when its last loan is released."""
        with self._lock:
            return sum(self._table.remove(key) is not None for key in keys)

    def size(self) -> StoreSize:
        """Return the number of objects, and the slots in bytes."""
        with self._lock:
            used = self._num_slots - self._table.num_free
            capacity = self._num_slots * self._slot_bytes
            return StoreSize(len(self._table), used * self._slot_bytes, capacity, self._num_slots)

    def close(self) -> None:
        """Delete all objects. The memory is freed when neither this store nor a loan is referenced any more."""
        with self._lock:
            self._table = SlotTable(0)

    def _write(self, block_object: BlockObject, num_bytes: int, slot: int) -> None:
        position = slot * self._slot_bytes
        try:
            block_object.write_to(self._arena[position : position + num_bytes], self._native)
        except BaseException:
            with self._lock:
                self._table.abandon(block_object.key, slot)
            raise
        with self._lock:
            self._table.publish(block_object.key, SlotEntry(slot, block_object.generation, num_bytes))

    def _lend(self, entry: SlotEntry) -> Loan:
        start = entry.slot * self._slot_bytes
        self._table.start_reading(entry)
        return Loan(self._arena[start : start + entry.num_bytes].data, partial(self._end_reading, self._table, entry))

    def _end_reading(self, table: SlotTable, entry: SlotEntry) -> None:
        with self._lock:
            table.end_reading(entry)
