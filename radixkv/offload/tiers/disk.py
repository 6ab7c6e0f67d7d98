"""Store on a local disk. Its contents survive the process, even if the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import mmap
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from radixkv.durable_file import replace_file
from radixkv.errors import StoreUnavailable
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreBackend, StoreSize
from radixkv.offload.tiers.namespace_file import NamespaceFile
from radixkv.offload.tiers.private_directory import require_private
from radixkv.offload.tiers.slot_files import Line, SlotFiles, SlotSizes
from radixkv.offload.tiers.slot_table import SlotEntry, SlotTable

_VERSION = 2
_STAT_BLOCK_BYTES = 512
_LABEL = "format.json"
_LOCK = "lock"
_log = logging.getLogger(__name__)
_NAMESPACES = "namespaces"
# Maximum size of the slots that are filled by one write, unless a single slot is larger. If the objects are encrypted,
# their encrypted copies take as much memory during the write.
_BATCH_BYTES = 16 << 20
_FULL_PAUSE_S = 60.0  # between attempts to grow on a full disk


class BufferPool:
    """A pool of page-aligned buffers of one size.

    Reuse and alignment both matter. The kernel zeroes new memory before its first use. Allocators return memory that
    begins 16 bytes after a page boundary; an EPYC copies from the page cache into such memory at a quarter of the
    speed. Pooled buffers are in one mapping, whose pages take memory when they are first written; with huge pages a
    read and its checksum take 4 % less time.

    Thread-safe: `list.append`, `list.pop` and `next` of a count are atomic.

    Args:
        buffer_bytes: size of each, a multiple of the page size.
        max_idle_bytes: maximum size of the buffers that stay in the pool.
    """

    def __init__(self, buffer_bytes: int, max_idle_bytes: int = 256 << 20) -> None:
        self._buffer_bytes = buffer_bytes
        self._num_pooled = max_idle_bytes // buffer_bytes
        self._pooled = _pages(max(1, self._num_pooled) * buffer_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pooled.madvise(mmap.MADV_HUGEPAGE)
        self._numbers = itertools.count()
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a buffer with arbitrary contents."""
        try:
            return self._idle.pop()
        except IndexError:
            number = next(self._numbers)
        if number >= self._num_pooled:
            return memoryview(_pages(self._buffer_bytes))
        return memoryview(self._pooled)[number * self._buffer_bytes : (number + 1) * self._buffer_bytes]

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer to the pool. The caller must not use it afterwards."""
        if buffer.obj is self._pooled:
            self._idle.append(buffer)


def _pages(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class DiskDirectory:
    """The directory of one block format below the configured one, named by the fingerprint of the format.

    It is created so that only the current user can read it. The process locks it; the kernel releases the lock if the
    process is killed.

    Args:
        parent: the configured directory; created if it does not exist.
        block_format: format of the blocks.
        must_be_private: whether to refuse a directory that other users can write.

    Raises:
        ConfigError: the directory must be private and is not; see `require_private`.
        StoreUnavailable: the directory is not writable, is locked by another process, has another format, or contains
            something other than regular files.
    """

    def __init__(self, parent: Path, block_format: BlockFormat, *, must_be_private: bool = False) -> None:
        self.path = parent / block_format.fingerprint
        self._label = {"version": _VERSION, "fingerprint": block_format.fingerprint, **asdict(block_format)}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if must_be_private:
                require_private(parent)
                require_private(self.path)
            self._require_own_files()
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            self._lock_and_check_format()
        except BaseException:
            os.close(self._lock)
            raise

    def _not_writable(self, error: OSError) -> StoreUnavailable:
        reason = f"{self.path}: {error.strerror}"
        return StoreUnavailable(f"tiers.disk_path: expected a directory to write to, got {reason}")

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def _require_own_files(self) -> None:
        """Refuse links, which lead to other files, and pipes, which block."""
        for path in (self.path, *self.path.iterdir()):
            mode = path.lstat().st_mode
            if not (stat.S_ISDIR(mode) if path == self.path else stat.S_ISREG(mode)):
                raise StoreUnavailable(f"tiers.disk_path: expected a directory of regular files only, got {path}")

    def _lock_and_check_format(self) -> None:
        """Lock the directory. Write the format of the blocks if none is recorded; otherwise require the same format."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: another process uses this directory") from error
        label = self.path / _LABEL
        try:
            if not label.exists():
                replace_file(label, json.dumps(self._label, indent=2).encode())
            if json.loads(label.read_bytes()) != self._label:
                raise StoreUnavailable(f"{label}: expected this model's format, got another")
        except (ValueError, RecursionError) as error:
            raise StoreUnavailable(f"{label}: expected this model's format, got something unreadable") from error
        except OSError as error:
            raise self._not_writable(error) from error


def half_of_free(path: Path) -> int:
    """Return half of the free bytes at a path, which need not exist. Blocks of earlier processes count as free."""
    own_bytes = sum(file.stat().st_blocks * _STAT_BLOCK_BYTES for file in path.glob("*/*")) if path.is_dir() else 0
    existing = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    return (shutil.disk_usage(existing).free + own_bytes) // 2


class DiskStore(StoreBackend):
    """Objects on a disk, in slots of whole pages. Only one process can open a directory.

    Args:
        path: `tiers.disk_path`. Each format has a directory of its own below it.
        block_format: format of the blocks.
        object_bytes: size of the largest object.
        max_bytes: capacity, `tiers.disk_bytes`; None for half of the free space, see `half_of_free`.
        clock: seconds, monotonic.
        native: reads and writes in C++, which is faster; None to use Python.
        must_be_private: whether to refuse a directory that other users can write, because blocks are neither
            authenticated nor encrypted.

    Attributes:
        path: directory of this format.
        namespaces: the known namespaces of the blocks on the disk.

    Raises:
        ConfigError: the directory must be private and is not.
        StoreUnavailable: the directory can't be used, or the capacity is less than one object.

    Complexity: opening reads 64 bytes per slot and takes about 2 us per stored object.
    """

    num_readers = 1  # the kernel would take alternating reads of two threads for random access, and not read ahead

    def __init__(
        self,
        path: Path,
        block_format: BlockFormat,
        object_bytes: int,
        max_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        native: NativeCopies | None = None,
        *,
        must_be_private: bool = False,
    ) -> None:
        self._sizes = SlotSizes.of(object_bytes, block_format.payload_bytes)
        self._max_slots = (half_of_free(path) if max_bytes is None else max_bytes) // self._sizes.slot_bytes
        if not self._max_slots:
            raise StoreUnavailable(_no_room_message(path, self._sizes.slot_bytes, max_bytes))
        self._clock = clock
        self._next_growth_s = clock()
        self._lock = threading.RLock()  # guards the slot table
        self._growth_lock = threading.Lock()  # only one thread grows the files
        self._is_closed = False
        self._last_order: Sequence[bytes] = ()
        self._buffers = BufferPool(self._sizes.buffer_bytes)
        self._directory = DiskDirectory(path, block_format, must_be_private=must_be_private)
        self.path = self._directory.path
        with contextlib.ExitStack() as on_error, _convert_errors(self.path):
            on_error.callback(self._directory.close)
            self._files = SlotFiles(self.path, self._sizes, self._max_slots, native)
            on_error.callback(self._files.close)
            self._table, self._serial = self._read_index()
            self.namespaces = NamespaceFile(self.path / _NAMESPACES)
            on_error.pop_all()  # everything is open

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Write objects. After this returns, they survive the process, but not necessarily a power failure."""
        with _convert_errors(self.path):
            self.namespaces.write()  # first, since blocks of unknown namespaces are useless
        remaining_victims = iter(victims)
        outcomes = list[PutOutcome]()
        evicted = list[bytes]()
        for batch in self._batches(objects):
            self._grow(len(batch))
            claimed: list[tuple[int, BlockObject]] = []
            try:
                with self._lock, _convert_errors(self.path):
                    batch_outcomes, batch_evicted = self._claim(batch, remaining_victims, claimed)
                with _convert_errors(self.path):
                    self._files.write_objects(claimed)
            except BaseException:
                with self._lock:
                    for slot, each in claimed:
                        self._table.abandon(each.key, slot)
                raise
            self._publish(claimed)
            outcomes += batch_outcomes
            evicted += batch_evicted
        return PutResult(tuple(outcomes), tuple(evicted))

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Read objects into buffers, which are reused after their loans are released."""
        with self._lock:
            entries = [self._table.find(key) for key in keys]
            stored = [entry for entry in entries if entry is not None]
            for entry in stored:
                self._table.start_reading(entry)
        buffers: list[memoryview] = []
        try:
            buffers.extend(self._buffers.take() for _ in stored)
            with _convert_errors(self.path):
                objects = self._files.read([(entry.slot, entry.num_bytes) for entry in stored], buffers)
        except BaseException:
            for buffer in buffers:
                self._buffers.give_back(buffer)
            raise
        finally:
            with self._lock:
                for entry in stored:
                    self._table.end_reading(entry)
        returns = (partial(self._buffers.give_back, buffer) for buffer in buffers)
        loans = (Loan(data, give_back, checksum) for (data, checksum), give_back in zip(objects, returns, strict=True))
        return [None if entry is None else next(loans) for entry in entries]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key. Does not count as a use."""
        with self._lock:
            return [self._table.find(key, is_use=False) is not None for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete objects durably: neither they nor previously evicted objects reappear after a power failure.

        Their bytes stay on the disk until they are overwritten.
        """
        with self._lock, _convert_errors(self.path):
            removed = [entry for key in keys if (entry := self._table.remove(key)) is not None]
            self._files.clear_lines(entry.slot for entry in removed)
        with _convert_errors(self.path):
            self._files.sync_lines()  # loads do not wait for it
        return len(removed)

    def size(self) -> StoreSize:
        """Return the number of objects, and the slots in bytes."""
        with self._lock:
            used = self._files.num_slots - self._table.num_free
            capacity = self._max_slots * self._sizes.slot_bytes
            return StoreSize(len(self._table), used * self._sizes.slot_bytes, capacity, self._max_slots)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over a snapshot of the keys in eviction order."""
        with self._lock:
            return iter([key for key, _ in self._table])

    def persist_order(self, keys: Sequence[bytes]) -> None:
        """Let `close` move these objects to the end of the eviction order, in this order, before writing the order."""
        self._last_order = keys

    def close(self) -> None:
        """Write everything to the disk, including the eviction order, and release the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        with _convert_errors(self.path), contextlib.ExitStack() as closing:  # closes all three whatever fails
            for each in (self._directory, self._files, self.namespaces):
                closing.callback(each.close)
            self._table.put_last(self._last_order)
            self._files.number_lines([entry.slot for _, entry in self._table], self._serial + 1)

    def _batches(self, objects: Sequence[BlockObject]) -> Iterator[list[BlockObject]]:
        """Divide objects into batches without duplicate keys, small enough that no batch evicts its own objects.

        Batches are large because each write evicts the interpreter's working set from the CPU caches.
        """
        batch: dict[bytes, BlockObject] = {}
        for each in objects:
            max_objects = min(_BATCH_BYTES // self._sizes.slot_bytes, self._files.num_slots // 2)
            if batch and (len(batch) >= max_objects or each.key in batch):
                yield list(batch.values())
                batch.clear()
            batch[each.key] = each
        if batch:
            yield list(batch.values())

    def _claim(
        self, batch: Sequence[BlockObject], victims: Iterator[bytes], claimed: list[tuple[int, BlockObject]]
    ) -> tuple[list[PutOutcome], list[bytes]]:
        """Claim slots for objects, and clear the index lines of objects that are replaced or evicted.

        The lines are cleared before the slots are overwritten, so that no deleted object reappears in the next process.

        Args:
            batch: objects with different keys.
            victims: as in `SlotTable.claim`.
            claimed: the claimed slots are appended, each with its object, even if this raises.

        Returns:
            The outcome of each object, and the evicted keys.
        """
        outcomes = list[PutOutcome]()
        evicted = list[bytes]()
        useless_slots = set[int]()
        for each in batch:
            if each.num_bytes not in self._sizes.object_sizes:
                outcomes.append(PutOutcome.TOO_LARGE)
                continue
            if self._table.has(each.key, each.generation):
                outcomes.append(PutOutcome.ALREADY_THERE)
                continue
            older = self._table.find(each.key)
            slot, evicted_keys = self._table.claim(each.key, victims)
            evicted += evicted_keys
            if older is not None:
                useless_slots.add(older.slot)
            if slot is None:
                outcomes.append(PutOutcome.NO_ROOM)
                continue
            outcomes.append(PutOutcome.STORED)
            claimed.append((slot, each))
            if evicted_keys:
                useless_slots.add(slot)
        self._files.clear_lines(useless_slots)
        return outcomes, evicted

    def _publish(self, written: Sequence[tuple[int, BlockObject]]) -> None:
        """Publish written objects, except those that were deleted during the write."""
        with self._lock, _convert_errors(self.path):
            lines: list[Line] = []
            for slot, each in written:
                entry = SlotEntry(slot, each.generation, each.num_bytes)
                if self._table.publish(each.key, entry):
                    self._serial += 1
                    lines.append(Line(slot, each.key, each.generation, self._serial, entry.num_bytes))
            self._files.write_lines(lines)

    def _grow(self, num_slots: int) -> None:
        """Grow the files if too few slots are free, unless the capacity is reached or the disk was full recently.

        Loads do not wait for this.
        """
        with self._growth_lock, _convert_errors(self.path):
            if (
                self._table.num_free >= num_slots
                or self._files.num_slots == self._max_slots
                or self._clock() < self._next_growth_s
            ):
                return
            new_slots = self._files.grow()
            with self._lock:
                self._table.add_slots(new_slots)
            if not new_slots:
                self._next_growth_s = self._clock() + _FULL_PAUSE_S
                size = self._files.num_slots * self._sizes.slot_bytes
                _log.warning("tiers.disk_path: the disk is full; %s continues with %d bytes", self.path, size)

    def _read_index(self) -> tuple[SlotTable, int]:
        """Read the index, and clear its invalid lines. Of two lines with the same key, the one written last is valid.

        Returns:
            The table of the stored objects, and the largest serial of their lines.
        """
        lines = self._files.lines()
        sizes = self._sizes.object_sizes
        is_valid = (lines["serial"] > 0) & (lines["bytes"] >= sizes.start) & (lines["bytes"] < sizes.stop)
        slots = np.flatnonzero(is_valid)
        slots = slots[np.argsort(lines["serial"][slots], kind="stable")]
        valid_lines = lines[slots]
        columns = (valid_lines[name].tolist() for name in ("key", "generation", "bytes"))
        rows = zip(slots.tolist(), *columns, strict=True)
        entries = ((key, SlotEntry(slot, generation, num_bytes)) for slot, key, generation, num_bytes in rows)
        table = SlotTable(0)
        table.add_objects(entries, self._files.num_slots)
        is_useless = lines["serial"] > 0
        is_useless[[entry.slot for _, entry in table]] = False
        # Otherwise an invalid line would become valid when the later line with the same key is deleted.
        self._files.clear_lines(np.flatnonzero(is_useless).tolist())
        return table, int(valid_lines["serial"][-1]) if len(valid_lines) else 0


def _no_room_message(path: Path, slot_bytes: int, max_bytes: int | None) -> str:
    if max_bytes is not None:
        return f"tiers.disk_bytes: expected at least {slot_bytes}, got {max_bytes}"
    min_bytes = 2 * slot_bytes
    return f"tiers.disk_path: expected at least {min_bytes} free bytes, half of them for blocks, got less: {path}"


@contextlib.contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into StoreUnavailable."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StoreUnavailable(f"tiers.disk_path: access to {path} failed: {reason}") from error
