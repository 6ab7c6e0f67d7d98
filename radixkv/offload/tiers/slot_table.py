"""Which object is in which slot of a store, and in which order objects are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class SlotEntry:
    """An object in a slot. Only the table modifies it.

    Attributes:
        slot: index of the slot.
        generation: generation of the object.
        num_bytes: size of the object.
        num_readers: reads and loans of the slot that have not ended. While there are any, the slot is not reused.
    """

    slot: int
    generation: int
    num_bytes: int
    num_readers: int = field(default=0)


class SlotTable:
    """Slots by key, in LRU order. Not thread-safe: its owner locks.

        free ── claim ──▶ being written ── publish ──▶ found by its key ── remove ──▶ free, after its last reader
                            └── abandon, or remove and then publish ──▶ free

    Args:
        num_slots: initial number of slots, all free.
    """

    def __init__(self, num_slots: int) -> None:
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots))  # a heap, so that objects stored together get adjacent slots
        self._removed: dict[int, SlotEntry] = {}  # removed while being read
        self._writing: dict[bytes, int] = {}  # claimed slots by key

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, SlotEntry]]:
        return iter(self._entries.items())

    @property
    def num_free(self) -> int:
        """Slots that can be claimed without an eviction."""
        return len(self._free)

    def add_slots(self, slots: Iterable[int]) -> None:
        """Add free slots."""
        self._free.extend(slots)
        heapify(self._free)

    def find(self, key: bytes, *, is_use: bool = True) -> SlotEntry | None:
        """Return the entry of a key, or None. A use moves it to the end of the eviction order."""
        entry = self._entries.get(key)
        if entry is not None and is_use:
            self._entries.move_to_end(key)
        return entry

    def has(self, key: bytes, generation: int) -> bool:
        """Whether an object of this or a later generation is stored or being written."""
        entry = self._entries.get(key)
        return key in self._writing or (entry is not None and entry.generation >= generation)

    def claim(self, key: bytes, victims: Iterator[bytes]) -> tuple[int | None, list[bytes]]:
        """Claim the lowest free slot for an object, evicting if needed. An older object of the key is removed.

        Args:
            key: key of the object.
            victims: keys to evict before all others; only as many as needed are taken from it.

        Returns:
            The slot, and the evicted keys. The slot is None if none can be freed: objects that are being read are not
            evicted, and no other object is evicted in place of a victim that is being read.
        """
        self.remove(key)
        evicted: list[bytes] = []
        while not self._free and (victim := self._next_victim(victims)) is not None:
            self.remove(victim)
            evicted.append(victim)
        if not self._free:
            return None, evicted
        slot = self._writing[key] = heappop(self._free)
        return slot, evicted

    def publish(self, key: bytes, entry: SlotEntry) -> bool:
        """Publish a written object; if it was removed during the write, free its slot and return False."""
        if self._writing.get(key) != entry.slot:
            heappush(self._free, entry.slot)
            return False
        del self._writing[key]
        self._entries[key] = entry
        return True

    def add_objects(self, found: Iterable[tuple[bytes, SlotEntry]], num_slots: int) -> None:
        """Add the objects of an earlier process.

        Args:
            found: keys and entries, in eviction order. Of two with the same key, the later one is kept.
            num_slots: number of slots; those without an object are free.
        """
        for key, entry in found:
            self._entries.pop(key, None)
            self._entries[key] = entry
        taken = {entry.slot for entry in self._entries.values()}
        self.add_slots(slot for slot in range(num_slots) if slot not in taken)

    def put_last(self, keys: Iterable[bytes]) -> None:
        """Move objects to the end of the eviction order, in this order. Keys without an object are ignored."""
        for key in keys:
            self.find(key)

    def abandon(self, key: bytes, slot: int) -> None:
        """Free a claimed slot whose write failed."""
        if self._writing.get(key) == slot:
            del self._writing[key]
        heappush(self._free, slot)

    def remove(self, key: bytes) -> SlotEntry | None:
        """Remove an object, also one that is being written. Return its entry; None if it was not published."""
        self._writing.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        if entry.num_readers:
            self._removed[entry.slot] = entry
        else:
            heappush(self._free, entry.slot)
        return entry

    def start_reading(self, entry: SlotEntry) -> None:
        """Prevent reuse of the slot of an entry until `end_reading`."""
        entry.num_readers += 1

    def end_reading(self, entry: SlotEntry) -> None:
        """Undo one `start_reading`."""
        entry.num_readers -= 1
        if not entry.num_readers and self._removed.get(entry.slot) is entry:
            del self._removed[entry.slot]
            heappush(self._free, entry.slot)

    def _next_victim(self, victims: Iterator[bytes]) -> bytes | None:
        """Return the key to evict next, from `victims` as long as there are any; None if `claim` may not evict any."""
        for key in victims:
            if (entry := self._entries.get(key)) is not None:
                return None if entry.num_readers else key
        return next((key for key, entry in self._entries.items() if not entry.num_readers), None)
