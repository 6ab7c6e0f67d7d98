"""The last save before the process ends: what is on the device goes to the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator

from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.offload.disk_record import DiskRecord
from radixkv.engine.offload.saver import Saver

_SAVED_AT_ONCE = 64  # blocks


class LastSave:
    """Saves what is on the device to the store `disk`, so that the next process finds it.

        used    last ...................... longest ago
        saved   first ....................... if there is time     so that what is likely to be wanted is there
        goes    last ............................... first         also in the next process

    Args:
        cache: tells what is on the device.
        elsewhere: knows what is stored.
        saver: copies blocks, and waits for the disk.
        record: tells the next process in which order blocks go, and their priorities; None for nothing.
    """

    def __init__(self, cache: PrefixCache, elsewhere: Elsewhere, saver: Saver, record: DiskRecord | None) -> None:
        self._cache = cache
        self._elsewhere = elsewhere
        self._saver = saver
        self._record = record

    def run(self, limit_s: float, *, knows_disk: bool = True) -> bool:
        """Save as much as there is time for. Returns whether stores have taken all that they were given.

        Args:
            limit_s: the time.
            knows_disk: whether it is known what earlier processes left on the disk. If not, the priorities that they
                noted are left as they are, and none are noted.
        """
        deadline_s = time.monotonic() + limit_s
        num_dropped_blocks = self._saver.num_dropped_blocks.total()
        self._saver.flush()
        is_whole = self._saver.wait(limit_s)
        shelf = self._elsewhere.shelves.get("disk")
        if shelf is None:
            return is_whole
        saved, is_whole = self._save(shelf.num_blocks, deadline_s) if is_whole else ([], False)
        for keys in reversed(saved):
            self._elsewhere.left("disk", keys)
        if self._record is not None:
            self._record.arrange(list(shelf))
            if knows_disk:
                self._record.keep(self._elsewhere.retention.wishes(shelf))
        return is_whole and self._saver.num_dropped_blocks.total() == num_dropped_blocks

    def _save(self, num_left: int, deadline_s: float) -> tuple[list[list[bytes]], bool]:
        """Save `num_left` blocks at most: what comes after them would push them out.

        Returns:
            The keys of the blocks in the order in which they were saved, and whether the disk has taken all.
        """
        saved: list[list[bytes]] = []
        for node, start, end in self._runs():
            saved.append(self._elsewhere.leave(node, start, min(end, start + num_left), ["disk"]))
            num_left -= len(saved[-1])
            self._saver.flush()
            if not self._saver.wait(max(0.0, deadline_s - time.monotonic())):
                return saved, False
            if not num_left:
                break
        return saved, self._saver.wait(max(0.0, deadline_s - time.monotonic()))

    def _runs(self) -> Iterator[tuple[Node, int, int]]:
        """Iterate over runs of blocks, those that were used last first, and beginnings before ends."""
        num_at_once = max(1, min(_SAVED_AT_ONCE, self._saver.max_waiting_blocks))
        for node in sorted(self._cache.nodes(), key=lambda node: (-node.last_used_s, node.start_bytes)):
            for start in range(0, node.num_blocks, num_at_once):
                yield node, start, min(node.num_blocks, start + num_at_once)
