"""Retention of what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.cache.elsewhere.retentions import Retentions, Wish
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.namespace import Namespace


class StoredRetention:
    """Gives stored blocks the priorities that callers asked for, and takes them back when their time is up.

    The blocks before one with a higher priority are of no less use than it, and get the same.

    Args:
        shelves: the stores, by name. Shared ones know no priorities.
    """

    def __init__(self, shelves: Mapping[str, Shelf]) -> None:
        self._shelves = [shelf for shelf in shelves.values() if not shelf.is_shared]
        self._retentions = Retentions()

    def priority_of(self, key: bytes) -> int:
        """Return the priority of a block."""
        return self._retentions.of(key)

    def note_leaving(self, blocks: Sequence[KeyedBlock], wish: Wish, first: int, path: Iterator[KeyedBlock]) -> None:
        """Note the priority that blocks have while they leave the device, unless it is lower; see `note`.

        If the block before them has the priority, so have all before that.

        Args:
            blocks: follow each other in a prompt.
            wish: the priority.
            first: place of the first of them in the prompt.
            path: yields the blocks of the prompt; untouched if those before need no priority, or have it.
        """
        before = self._retentions.wish_of(blocks[0].parent) if blocks else None
        have_it = before is not None and (before == wish or before.priority > wish.priority)
        if have_it or wish.priority < DEFAULT_PRIORITY:
            self.note(blocks, 0, wish)
        else:
            self.note(list(islice(path, first + len(blocks))), first, wish)

    def note(self, path: Sequence[KeyedBlock], start: int, wish: Wish) -> None:
        """Note the priority of the blocks from `start` on that leave the device, where it is more than they have.

        Args:
            path: the first blocks of a prompt.
            start: index in `path`.
            wish: the priority.
        """
        self._give(path, start, wish, self._retentions.raise_to)

    def set(self, path: Sequence[KeyedBlock], start: int, wish: Wish) -> None:
        """Give the stored ones of the blocks from `start` on a priority, whatever it was before; see `note`.

        Others have none here: on the device they have it there, and what is nowhere may never come.
        """
        for block in path[start:]:
            self._retentions.forget(block.key)
        num_before = sum(self._is_stored(block) for block in path[:start])
        self._give(list(filter(self._is_stored, path)), num_before, wish, self._retentions.set)

    def wishes(self, shelf: Shelf) -> list[tuple[bytes, Wish]]:
        """List the blocks of a store that have another priority than the default, the one that goes first at first."""
        found = ((key, self._retentions.wish_of(key)) for key in shelf)
        return [(key, wish) for key, wish in found if wish is not None]

    def restore(self, shelf: Shelf, wishes: Sequence[tuple[bytes, Wish]]) -> None:
        """Give blocks of a store the priorities that `wishes` listed in an earlier process.

        Those that have a priority in this process keep it.
        """
        for key, wish in wishes:
            if key in shelf and key not in self._retentions:
                self._reorder(self._retentions.set(key, shelf.owned[key], wish))
                self._reorder(key)

    def granted(self, blocks: Sequence[KeyedBlock], priority: int) -> tuple[int, int]:
        """Count the blocks that have a priority, up to the first without, and those that are stored, likewise."""
        stored = list(takewhile(self._is_stored, blocks))
        granted = takewhile(lambda block: self._has(block.key, priority), stored)
        return sum(1 for _ in granted), len(stored)

    def expire(self, now_s: float) -> None:
        """End priorities whose time has come, 256 at most."""
        for key in self._retentions.expire(now_s):
            self._reorder(key)

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Forget the blocks of all namespaces with these names, None for any."""
        self._retentions.purge(tenant, adapter, salt)

    def _give(
        self,
        path: Sequence[KeyedBlock],
        start: int,
        wish: Wish,
        give: Callable[[bytes, Namespace, Wish], bytes | None],
    ) -> None:
        for index, block in reversed(list(enumerate(path))):  # where not all may be kept, the beginning is
            if index >= start:
                self._reorder(give(block.key, block.namespace, wish))
            elif wish.priority > DEFAULT_PRIORITY:
                self._reorder(self._retentions.raise_to(block.key, block.namespace, wish))
            self._reorder(block.key)

    def _reorder(self, key: bytes | None) -> None:
        """Put a block in its place where it is, if its priority is another one now. None is no block."""
        if key is None:
            return
        priority = self._retentions.of(key)
        for shelf in self._shelves:
            if key in shelf and not shelf.is_on_device(key) and shelf.priority_of(key) != priority:
                shelf.note_left(key, priority)

    def _is_stored(self, block: KeyedBlock) -> bool:
        return any(block.key in shelf for shelf in self._shelves)

    def _has(self, key: bytes, priority: int) -> bool:
        return any(key in shelf and shelf.priority_of(key) == priority for shelf in self._shelves)
