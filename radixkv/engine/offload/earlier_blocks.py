"""Blocks that earlier processes left on the disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator

from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.elsewhere.stored_retention import StoredRetention
from radixkv.engine.offload.disk_record import DiskRecord, EarlierDisk
from radixkv.errors import StoreError

_log = logging.getLogger(__name__)
_READING_SLICE_S = 0.001


class EarlierBlocks:
    """Finds on a thread of its own what a disk holds, while requests are served.

    Args:
        record: of the disk.
        shelf: gets what is found.
        retention: gets the priorities of that.
    """

    def __init__(self, record: DiskRecord, shelf: Shelf, retention: StoredRetention) -> None:
        self._record = record
        self._shelf = shelf
        self._retention = retention
        self._found: queue.SimpleQueue[EarlierDisk] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="disk-record", daemon=True)
        self._reader.start()

    def take(self) -> None:
        """Let the shelf know of what was found since the last call."""
        while not self._found.empty():
            blocks, wishes = self._found.get()
            self._shelf.add_found(blocks)
            self._retention.restore(self._shelf, wishes)

    def reading(self) -> Iterator[None]:
        """Yield until all is found."""
        while self._reader.is_alive():
            self._reader.join(_READING_SLICE_S)
            yield

    def _read(self) -> None:
        try:
            self._found.put(self._record.read())
        except StoreError as error:
            _log.error("tier disk: expected to read what it holds, got: %s", error)
