"""Blocks that earlier processes left on the disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.elsewhere.stored_retention import StoredRetention
from radixkv.engine.offload.disk_record import DiskRecord, EarlierDisk

_log = logging.getLogger(__name__)
_READING_SLICE_S = 0.001
_TAKEN_AT_ONCE = 256  # blocks; some milliseconds
_END = object()


class EarlierBlocks:
    """Finds on a thread of its own what a disk holds, while requests are served.

    Args:
        record: of the disk.
        shelf: gets what is found, some blocks at a time, those first that go last.
        retention: gets the priorities of that.
        delete: deletes what the shelf has no room for from the disk, since no purge would find it.
        wake: called on the other thread when there is something to take.

    Attributes:
        has_failed: whether nobody knows all that the disk holds, because it could not be read or not be taken.
    """

    def __init__(
        self,
        record: DiskRecord,
        shelf: Shelf,
        retention: StoredRetention,
        delete: Callable[[Sequence[bytes]], object],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_failed = False
        self._record = record
        self._shelf = shelf
        self._retention = retention
        self._delete = delete
        self._wake = wake
        self._found: queue.SimpleQueue[EarlierDisk] = queue.SimpleQueue()
        self._slices: Iterator[None] | None = None
        self._reader = threading.Thread(target=self._read, name="disk-record", daemon=True)
        self._reader.start()

    @property
    def has_more(self) -> bool:
        """Whether there is something to take."""
        return self._slices is not None or not self._found.empty()

    def take(self) -> None:
        """Let the shelf know of some of what was found. Once it knows all, let the record forget what is not there.

        If it raises, what was not taken by then never is, and `has_failed`.
        """
        is_read = not self._reader.is_alive()  # asked first: what it found may come while we look
        if self._slices is None and not self._found.empty():
            self._slices = self._taking(self._found.get())
        if self._slices is not None:
            try:
                is_over = next(self._slices, _END) is _END
            except BaseException:
                self._slices, self.has_failed = None, True  # a generator that raised yields no more
                raise
            if is_over:
                self._slices = None
        elif is_read and not self.has_failed:
            self._record.tidy(self._shelf.owned)

    def reading(self) -> Iterator[None]:
        """Yield until all is found and taken."""
        while self._reader.is_alive():
            self._reader.join(_READING_SLICE_S)
            yield
        while self.has_more:
            self.take()
            yield

    def finish(self, limit_s: float) -> bool:
        """Wait until all is found, and take it, no longer than `limit_s` in all. Returns whether all is taken."""
        deadline_s = time.monotonic() + limit_s
        self._reader.join(limit_s)
        is_read = not self._reader.is_alive()
        try:
            while self.has_more and time.monotonic() < deadline_s:
                self.take()
        except Exception:  # noqa: BLE001 - whatever it is, stores are to be closed after this
            _log.exception("tier disk: expected to take what it holds")
        return is_read and not self.has_more and not self.has_failed

    def _taking(self, found: EarlierDisk) -> Iterator[None]:
        blocks, wishes = reversed(found.blocks), iter(found.wishes)
        while some := list(islice(blocks, _TAKEN_AT_ONCE)):
            if left_out := self._shelf.add_found(some):
                self._delete(left_out)
            yield
        while some_wishes := list(islice(wishes, _TAKEN_AT_ONCE)):
            self._retention.restore(self._shelf, some_wishes)
            yield

    def _read(self) -> None:
        try:
            self._found.put(self._record.read())
        except Exception:  # noqa: BLE001 - whatever it is, a purge must tell that it may not have reached all
            _log.exception("tier disk: expected to read what it holds")
            self.has_failed = True
        self._wake()
