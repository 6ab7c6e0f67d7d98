"""Restart: the disk is scanned at the start, and the blocks on the device are saved to it on shutdown."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.offload.disk_record import DiskRecord, FoundOnDisk
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.retention import StoredRetention
from radixkv.offload.index.tier_index import TierIndex
from radixkv.offload.saver import Saver

_log = logging.getLogger(__name__)
_JOIN_SLICE_S = 0.001
_TAKEN_AT_ONCE = 256  # blocks; some milliseconds
_END = object()
_SAVED_AT_ONCE = 64  # blocks


class DiskScan:
    """Scans the disk on a thread of its own, while requests are served.

    Args:
        record: what the disk records about its blocks.
        tier_index: the blocks are added to it in batches, most recently used first.
        retention: receives the priorities of the blocks.
        delete: deletes from the disk the blocks that do not fit into the index, since no purge would find them.
        wake: called on the scanning thread when there are results.

    Attributes:
        has_failed: whether the scan failed, so that blocks on the disk may be unknown.
    """

    def __init__(
        self,
        record: DiskRecord,
        tier_index: TierIndex,
        retention: StoredRetention,
        delete: Callable[[Sequence[bytes]], object],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_failed = False
        self._record = record
        self._tier_index = tier_index
        self._retention = retention
        self._delete = delete
        self._wake = wake
        self._found: queue.SimpleQueue[FoundOnDisk] = queue.SimpleQueue()
        self._slices: Iterator[None] | None = None
        self._reader = threading.Thread(target=self._scan, name="disk-record", daemon=True)
        self._reader.start()

    @property
    def has_more(self) -> bool:
        """Whether there are results to take."""
        return self._slices is not None or not self._found.empty()

    def take(self) -> None:
        """Add some of the blocks that were found to the index. After the last one, forget namespaces without blocks.

        If it raises, the remaining blocks are never added, and `has_failed` is true.
        """
        is_scanned = not self._reader.is_alive()  # checked first, since results may arrive in the meantime
        if self._slices is None and not self._found.empty():
            self._slices = self._add_in_slices(self._found.get())
        if self._slices is not None:
            try:
                is_over = next(self._slices, _END) is _END
            except BaseException:
                self._slices, self.has_failed = None, True  # a generator that raised yields no more
                raise
            if is_over:
                self._slices = None
        elif is_scanned and not self.has_failed:
            self._record.tidy(self._tier_index.owned)

    def wait_for_end(self) -> Iterator[None]:
        """Yield until the scan is finished and all results are taken."""
        while self._reader.is_alive():
            self._reader.join(_JOIN_SLICE_S)
            yield
        while self.has_more:
            self.take()
            yield

    def finish(self, limit_s: float) -> bool:
        """Wait for the scan and take all results, within `limit_s`. Returns whether all are taken."""
        deadline_s = time.monotonic() + limit_s
        self._reader.join(limit_s)
        is_scanned = not self._reader.is_alive()
        try:
            while self.has_more and time.monotonic() < deadline_s:
                self.take()
        except Exception:  # noqa: BLE001 - the stores must still be closed
            _log.exception("tier disk: adding its blocks to the index failed")
        return is_scanned and not self.has_more and not self.has_failed

    def _add_in_slices(self, found: FoundOnDisk) -> Iterator[None]:
        blocks, hints = reversed(found.blocks), iter(found.hints)
        while block_batch := list(islice(blocks, _TAKEN_AT_ONCE)):
            if left_out := self._tier_index.add_found(block_batch):
                self._delete(left_out)
            yield
        while hint_batch := list(islice(hints, _TAKEN_AT_ONCE)):
            self._retention.restore(self._tier_index, hint_batch)
            yield

    def _scan(self) -> None:
        try:
            self._found.put(self._record.read())
        except Exception:  # noqa: BLE001 - purges report the failure
            _log.exception("tier disk: the scan failed")
            self.has_failed = True
        self._wake()


class ShutdownSave:
    """Saves the blocks on the device to the tier `disk` on shutdown.

        most recently used ............. least recently used
        saved first .................... saved if there is time
        evicted last ................... evicted first, also in the next process

    Args:
        cache: the radix trees.
        offload_index: knows which blocks are stored.
        saver: copies blocks, and waits for the disk.
        record: stores the eviction order and the priorities for the next process; None to store neither.
    """

    def __init__(
        self, cache: PrefixCache, offload_index: OffloadIndex, saver: Saver, record: DiskRecord | None
    ) -> None:
        self._cache = cache
        self._index = offload_index
        self._saver = saver
        self._record = record

    def run(self, limit_s: float, *, knows_disk: bool = True) -> bool:
        """Save as many blocks as the time limit allows.

        Args:
            limit_s: time limit in seconds.
            knows_disk: whether the disk was scanned. If not, the priorities that earlier processes stored are kept
                unchanged.

        Returns:
            Whether all saves ended within the limit, and no block was dropped; see `Saver.num_dropped_blocks`.
        """
        deadline_s = time.monotonic() + limit_s
        num_dropped_blocks = self._saver.num_dropped_blocks.total()
        self._saver.flush()
        is_whole = self._saver.wait(limit_s)
        tier_index = self._index.tiers.get("disk")
        if tier_index is None:
            return is_whole
        saved, is_whole = self._save(tier_index.num_blocks, deadline_s) if is_whole else ([], False)
        for keys in reversed(saved):
            self._index.note_evicted("disk", keys)
        if self._record is not None:
            self._record.persist_order(list(tier_index))
            if knows_disk:
                self._record.persist_priorities(self._index.retention.hints(tier_index))
        return is_whole and self._saver.num_dropped_blocks.total() == num_dropped_blocks

    def _save(self, max_blocks: int, deadline_s: float) -> tuple[list[list[bytes]], bool]:
        """Save at most `max_blocks` blocks. Saving more would evict those that were saved first.

        Returns:
            The keys of the blocks in the order in which they were saved, and whether all saves ended within the limit.
        """
        saved: list[list[bytes]] = []
        for node, start, end in self._runs():
            saved.append(self._index.queue(node, start, min(end, start + max_blocks), ["disk"]))
            max_blocks -= len(saved[-1])
            self._saver.flush()
            if not self._saver.wait(max(0.0, deadline_s - time.monotonic())):
                return saved, False
            if not max_blocks:
                break
        return saved, self._saver.wait(max(0.0, deadline_s - time.monotonic()))

    def _runs(self) -> Iterator[tuple[Node, int, int]]:
        """Iterate over runs of blocks, most recently used first, and from the beginning of a prompt to its end."""
        num_at_once = max(1, min(_SAVED_AT_ONCE, self._saver.max_waiting_blocks))
        for node in sorted(self._cache.nodes(), key=lambda node: (-node.last_used_s, node.start_bytes)):
            for start in range(0, node.num_blocks, num_at_once):
                yield node, start, min(node.num_blocks, start + num_at_once)
