"""Books of a store with slots of one size: who is in which slot, and who goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class SlotEntry:
    """An object in a slot. Only its table changes it.

    Attributes:
        slot: number of the slot.
        generation: of the object.
        num_bytes: of the object.
        num_readers: loans of the slot. It is not given to another object before the last one ends.
    """

    slot: int
    generation: int
    num_bytes: int
    num_readers: int = field(default=0)


class SlotTable:
    """Slots by key, in the order of use. Not safe for threads: its owner has a lock.

        free ── claim ──▶ being written ── publish ──▶ found by its key ── remove ──▶ free, after its last reader
                            └── abandon, or remove and publish ──▶ free

    Args:
        num_slots: slots that there are at first; all are free.
    """

    def __init__(self, num_slots: int) -> None:
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()  # what was not used for longest is first
        self._free = list(range(num_slots))  # a heap: what is stored together gets neighbors
        self._leaving: dict[int, SlotEntry] = {}  # removed while somebody read them
        self._writing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, SlotEntry]]:
        return iter(self._entries.items())

    @property
    def num_free(self) -> int:
        """Slots that can be claimed without evicting."""
        return len(self._free)

    def add_slots(self, slots: Iterable[int]) -> None:
        """Add free slots."""
        self._free.extend(slots)
        heapify(self._free)

    def find(self, key: bytes, *, is_use: bool = True) -> SlotEntry | None:
        """Return the entry of a key, or None; where it is a use, it is the last one to go."""
        entry = self._entries.get(key)
        if entry is not None and is_use:
            self._entries.move_to_end(key)
        return entry

    def has(self, key: bytes, generation: int) -> bool:
        """Whether an object of this or a later generation is there, or is being written."""
        entry = self._entries.get(key)
        return key in self._writing or (entry is not None and entry.generation >= generation)

    def claim(self, key: bytes, give_up: Iterator[bytes]) -> tuple[int | None, list[bytes]]:
        """Take a slot to write an object into, the first that is free; the key's older object goes.

        Args:
            key: of the object.
            give_up: keys that may go first; as many are taken from it as are needed.

        Returns:
            The slot, None if there is none to be had: what is being read is never evicted, and nothing else goes
            instead of a key that was given up. And the keys that were evicted.
        """
        self.remove(key)
        evicted: list[bytes] = []
        while not self._free and (victim := self._victim(give_up)) is not None:
            self.remove(victim)
            evicted.append(victim)
        if not self._free:
            return None, evicted
        slot = self._writing[key] = heappop(self._free)
        return slot, evicted

    def publish(self, key: bytes, entry: SlotEntry) -> bool:
        """Make a written object known, unless it was removed meanwhile: then its slot is free. Return whether it is."""
        if self._writing.get(key) != entry.slot:
            heappush(self._free, entry.slot)
            return False
        del self._writing[key]
        self._entries[key] = entry
        return True

    def add_objects(self, found: Iterable[tuple[bytes, SlotEntry]], num_slots: int) -> None:
        """Add objects that an earlier process left, the last one used last; of two with one key the later one counts.

        Args:
            found: keys and entries.
            num_slots: slots that there are; those without an object are free.
        """
        for key, entry in found:
            self._entries.pop(key, None)
            self._entries[key] = entry
        taken = {entry.slot for entry in self._entries.values()}
        self.add_slots(slot for slot in range(num_slots) if slot not in taken)

    def put_last(self, keys: Iterable[bytes]) -> None:
        """Let objects go after all others, the last one last. Keys without an object are left out."""
        for key in keys:
            self.find(key)

    def abandon(self, key: bytes, slot: int) -> None:
        """Free a claimed slot into which nothing was written."""
        if self._writing.get(key) == slot:
            del self._writing[key]
        heappush(self._free, slot)

    def remove(self, key: bytes) -> SlotEntry | None:
        """Forget an object, also one that is being written; return its entry, or None if none could be found."""
        self._writing.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        if entry.num_readers:
            self._leaving[entry.slot] = entry
        else:
            heappush(self._free, entry.slot)
        return entry

    def start_reading(self, entry: SlotEntry) -> None:
        """Keep an entry's slot as it is until `end_reading`."""
        entry.num_readers += 1

    def end_reading(self, entry: SlotEntry) -> None:
        """End one reading."""
        entry.num_readers -= 1
        if not entry.num_readers and self._leaving.get(entry.slot) is entry:
            del self._leaving[entry.slot]
            heappush(self._free, entry.slot)

    def _victim(self, give_up: Iterator[bytes]) -> bytes | None:
        for key in give_up:
            if (entry := self._entries.get(key)) is not None:
                return None if entry.num_readers else key
        return next((key for key, entry in self._entries.items() if not entry.num_readers), None)
