"""Store on a local disk. It survives the process, at whatever moment that dies."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from radixkv.errors import StoreUnavailable
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreBackend, StoreSize
from radixkv.offload.tiers.namespace_file import NamespaceFile
from radixkv.offload.tiers.slot_file import Line, SlotFile, SlotSizes
from radixkv.offload.tiers.slot_table import SlotEntry, SlotTable

_VERSION = 2
_STAT_BLOCK_BYTES = 512
_LABEL, _LOCK = "format.json", "lock"
_log = logging.getLogger(__name__)
_NAMES = "namespaces"
_BATCH_BYTES = 16 << 20  # written at a time; sealed objects take as much memory meanwhile
_FULL_PAUSE_S = 60.0  # a full disk is asked for room again after this


class BufferPool:
    """Buffers of one size, each at the start of a page.

    Both matter: new memory is filled with zeros first, and into memory that begins 16 bytes after a page, as an
    allocator gives it, an EPYC copies from the page cache at a quarter of the speed. Those that are kept are in one
    allocation, which takes room once it is written to; with huge pages a read and its checksum take 4 % less time.

    Safe for threads: a list's append and pop are whole, and so is a count's next.

    Args:
        buffer_bytes: size of each, whole pages.
        max_idle_bytes: bytes of buffers that are kept while nobody uses them.
    """

    def __init__(self, buffer_bytes: int, max_idle_bytes: int = 256 << 20) -> None:
        self._buffer_bytes = buffer_bytes
        self._num_kept = max_idle_bytes // buffer_bytes
        self._kept = _pages(max(1, self._num_kept) * buffer_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._kept.madvise(mmap.MADV_HUGEPAGE)
        self._numbers = itertools.count()
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a buffer, whatever is in it."""
        try:
            return self._idle.pop()
        except IndexError:
            number = next(self._numbers)
        if number >= self._num_kept:
            return memoryview(_pages(self._buffer_bytes))
        return memoryview(self._kept)[number * self._buffer_bytes : (number + 1) * self._buffer_bytes]

    def give_back(self, buffer: memoryview) -> None:
        """Take a buffer back. Nobody may use it after this."""
        if buffer.obj is self._kept:
            self._idle.append(buffer)


def _pages(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class DiskDirectory:
    """A directory below the configured one, named by a format's fingerprint; readable by this user alone.

    Its lock is the process's, so a process that is killed leaves none behind.

    Args:
        parent: the configured directory; made if there is none.
        block_format: format of the blocks.

    Raises:
        StoreUnavailable: it can't be written, another process has it, or it is of another format.
    """

    def __init__(self, parent: Path, block_format: BlockFormat) -> None:
        self.path = parent / block_format.fingerprint
        self._label = {"version": _VERSION, "fingerprint": block_format.fingerprint, **asdict(block_format)}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            self._claim()
        except BaseException:
            os.close(self._lock)
            raise

    def _not_writable(self, error: OSError) -> StoreUnavailable:
        reason = f"{self.path}: {error.strerror}"
        return StoreUnavailable(f"tiers.disk_path: expected a directory to write to, got {reason}")

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: expected to be alone, got another process that uses it") from error
        label = self.path / _LABEL
        try:
            if not label.exists():
                self._write(label)
            if json.loads(label.read_bytes()) != self._label:
                raise StoreUnavailable(f"{label}: expected this model's format, got another")
        except ValueError as error:
            raise StoreUnavailable(f"{label}: expected this model's format, got something unreadable") from error
        except OSError as error:
            raise self._not_writable(error) from error

    def _write(self, label: Path) -> None:
        """Write the label: the old one or the whole new one is there, also after a power failure."""
        partial = label.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(self._label, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(label)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def half_of_free(path: Path) -> int:
    """Return half of the bytes that are free for blocks at a path, those that blocks of earlier starts take too.

    The path need not exist yet.
    """
    ours = sum(file.stat().st_blocks * _STAT_BLOCK_BYTES for file in path.glob("*/*")) if path.is_dir() else 0
    parent = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    return (shutil.disk_usage(parent).free + ours) // 2


class DiskStore(StoreBackend):
    """Objects on a disk, in slots of whole pages. One process has a directory; another one is refused.

    Args:
        path: `tiers.disk_path`. Each format has a directory of its own below it.
        block_format: format of the blocks.
        object_bytes: size of the largest object.
        max_bytes: the bound, `tiers.disk_bytes`; None for half of what is free, blocks of earlier starts too.
        clock: seconds, monotonic.
        native: see `SlotFile`.

    Attributes:
        path: directory of this format.
        names: of the namespaces whose blocks are here, as far as anybody has told.

    Raises:
        StoreUnavailable: the directory can't be used, or the bound has no room for one object.

    Complexity: starting reads 64 bytes a slot and takes about 2 us for each object that is there.
    """

    num_readers = 1  # two that take turns look random to the system, which then does not read ahead

    def __init__(
        self,
        path: Path,
        block_format: BlockFormat,
        object_bytes: int,
        max_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        native: NativeCopies | None = None,
    ) -> None:
        self._sizes = SlotSizes.of(object_bytes, block_format.payload_bytes)
        self._max_slots = (half_of_free(path) if max_bytes is None else max_bytes) // self._sizes.slot_bytes
        if not self._max_slots:
            raise StoreUnavailable(_no_room(path, self._sizes.slot_bytes, max_bytes))
        self._clock, self._next_growth_s = clock, clock()
        self._lock, self._growth = threading.RLock(), threading.Lock()  # of the books; of who takes more room
        self._is_closed = False
        self._last: Sequence[bytes] = ()
        self._buffers = BufferPool(self._sizes.buffer_bytes)
        self._directory = DiskDirectory(path, block_format)
        self.path = self._directory.path
        with contextlib.ExitStack() as ends, _failures(self.path):
            ends.callback(self._directory.close)
            self._file = SlotFile(self.path, self._sizes, self._max_slots, native)
            ends.callback(self._file.close)
            self._table, self._serial = self._found()
            self.names = NamespaceFile(self.path / _NAMES)
            ends.pop_all()  # all is open

    def put(self, objects: Sequence[BlockObject], give_up: Sequence[bytes] = ()) -> PutResult:
        """Write objects. They are there for the next process once this returns, and after a power failure perhaps."""
        with _failures(self.path):
            self.names.write()  # without the names of their namespaces blocks are of no use
        left, outcomes, evicted = iter(give_up), list[PutOutcome](), list[bytes]()
        for batch in self._batches(objects):
            self._grow(len(batch))
            claimed: list[tuple[int, BlockObject]] = []
            try:
                with self._lock, _failures(self.path):
                    fates, gone = self._claim(batch, left, claimed)
                with _failures(self.path):
                    self._file.write_objects(claimed)
            except BaseException:
                with self._lock:
                    for slot, each in claimed:
                        self._table.abandon(each.key, slot)
                raise
            self._publish(claimed)
            outcomes += fates
            evicted += gone
        return PutResult(tuple(outcomes), tuple(evicted))

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Read objects into buffers, which are used again after the loans."""
        with self._lock:
            entries = [self._table.find(key) for key in keys]
            there = [entry for entry in entries if entry is not None]
            for entry in there:
                self._table.start_reading(entry)
        buffers: list[memoryview] = []
        try:
            buffers.extend(self._buffers.take() for _ in there)
            with _failures(self.path):
                found = self._file.read([(entry.slot, entry.num_bytes) for entry in there], buffers)
        except BaseException:
            for buffer in buffers:
                self._buffers.give_back(buffer)
            raise
        finally:
            with self._lock:
                for entry in there:
                    self._table.end_reading(entry)
        returns = (partial(self._buffers.give_back, buffer) for buffer in buffers)
        loans = (Loan(data, give_back, checksum) for (data, checksum), give_back in zip(found, returns, strict=True))
        return [None if entry is None else next(loans) for entry in entries]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key; it is no use of it."""
        with self._lock:
            return [self._table.find(key, is_use=False) is not None for key in keys]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget objects, and whatever left before: none of them is back after a power failure.

        Their bytes stay on the disk until others are written there.
        """
        with self._lock, _failures(self.path):
            gone = [entry for key in keys if (entry := self._table.remove(key)) is not None]
            self._file.clear_lines(entry.slot for entry in gone)
        with _failures(self.path):
            self._file.sync_lines()  # loads do not wait for it
        return len(gone)

    def size(self) -> StoreSize:
        """Return slots and their bytes."""
        with self._lock:
            used = self._file.num_slots - self._table.num_free
            capacity = self._max_slots * self._sizes.slot_bytes
            return StoreSize(len(self._table), used * self._sizes.slot_bytes, capacity, self._max_slots)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys of what is here now, the one that goes first at first."""
        with self._lock:
            return iter([key for key, _ in self._table])

    def arrange(self, keys: Sequence[bytes]) -> None:
        """Let the next process find objects in this order behind all others. It is written at the end; nobody waits."""
        self._last = keys

    def close(self) -> None:
        """Write everything to the disk, and in which order objects go, and let another process have the directory."""
        if self._is_closed:
            return
        self._is_closed = True
        with _failures(self.path), contextlib.ExitStack() as ends:  # whatever fails
            for each in (self._directory, self._file, self.names):
                ends.callback(each.close)
            self._table.put_last(self._last)
            self._file.number_lines([entry.slot for _, entry in self._table], self._serial + 1)

    def _batches(self, objects: Sequence[BlockObject]) -> Iterator[list[BlockObject]]:
        """Divide objects into those that are written together: different ones, that need not evict each other.

        Each write leaves little in the caches of what Python needs, so it is asked for more at a time.
        """
        batch: dict[bytes, BlockObject] = {}
        for each in objects:
            most = min(_BATCH_BYTES // self._sizes.slot_bytes, self._file.num_slots // 2)
            if batch and (len(batch) >= most or each.key in batch):
                yield list(batch.values())
                batch.clear()
            batch[each.key] = each
        if batch:
            yield list(batch.values())

    def _claim(
        self, batch: Sequence[BlockObject], give_up: Iterator[bytes], claimed: list[tuple[int, BlockObject]]
    ) -> tuple[list[PutOutcome], list[bytes]]:
        """Claim slots. Lines of what leaves go first, so that nothing deleted comes back with the next process.

        Args:
            batch: objects with different keys.
            give_up: as in `SlotTable.claim`.
            claimed: gets the slots, each with its object, also if this fails.

        Returns:
            What becomes of each object, and the keys that were evicted.
        """
        outcomes, evicted, useless = list[PutOutcome](), list[bytes](), set[int]()
        for each in batch:
            if each.num_bytes not in self._sizes.object_bytes:
                outcomes.append(PutOutcome.TOO_LARGE)
                continue
            if self._table.has(each.key, each.generation):
                outcomes.append(PutOutcome.ALREADY_THERE)
                continue
            older = self._table.find(each.key)
            slot, gone = self._table.claim(each.key, give_up)
            evicted += gone
            if older is not None:
                useless.add(older.slot)
            if slot is None:
                outcomes.append(PutOutcome.NO_ROOM)
                continue
            outcomes.append(PutOutcome.STORED)
            claimed.append((slot, each))
            if gone:
                useless.add(slot)
        self._file.clear_lines(useless)
        return outcomes, evicted

    def _publish(self, written: Sequence[tuple[int, BlockObject]]) -> None:
        """Make objects known, but not those that somebody deleted meanwhile."""
        with self._lock, _failures(self.path):
            lines: list[Line] = []
            for slot, each in written:
                entry = SlotEntry(slot, each.generation, each.num_bytes)
                if self._table.publish(each.key, entry):
                    self._serial += 1
                    lines.append(Line(slot, each.key, each.generation, self._serial, entry.num_bytes))
            self._file.write_lines(lines)

    def _grow(self, num_slots: int) -> None:
        """Take more room if less is free, the bound allows it and the disk was not just full. Loads do not wait."""
        with self._growth, _failures(self.path):
            if (
                self._table.num_free >= num_slots
                or self._file.num_slots == self._max_slots
                or self._clock() < self._next_growth_s
            ):
                return
            new = self._file.grow()
            with self._lock:
                self._table.add_slots(new)
            if not new:
                self._next_growth_s = self._clock() + _FULL_PAUSE_S
                size = self._file.num_slots * self._sizes.slot_bytes
                _log.warning("tiers.disk_path: the disk is full; going on with %d bytes of %s", size, self.path)

    def _found(self) -> tuple[SlotTable, int]:
        """Read the index: of two lines with one key the later one counts. Lines that do not count are cleared."""
        lines = self._file.lines()
        sizes = self._sizes.object_bytes
        is_there = (lines["serial"] > 0) & (lines["bytes"] >= sizes.start) & (lines["bytes"] < sizes.stop)
        slots = np.flatnonzero(is_there)
        slots = slots[np.argsort(lines["serial"][slots], kind="stable")]
        found = lines[slots]
        columns = (found[name].tolist() for name in ("key", "generation", "bytes"))
        rows = zip(slots.tolist(), *columns, strict=True)
        table = SlotTable(0)
        table.add_objects(((key, SlotEntry(slot, *rest)) for slot, key, *rest in rows), self._file.num_slots)
        is_useless = lines["serial"] > 0
        is_useless[[entry.slot for _, entry in table]] = False
        self._file.clear_lines(np.flatnonzero(is_useless).tolist())  # or they count once the later ones are deleted
        return table, int(found["serial"][-1]) if len(found) else 0


def _no_room(path: Path, slot_bytes: int, max_bytes: int | None) -> str:
    if max_bytes is not None:
        return f"tiers.disk_bytes: expected at least {slot_bytes}, got {max_bytes}"
    return (
        f"tiers.disk_path: expected a disk with {2 * slot_bytes} bytes free, half of them for blocks, got less: {path}"
    )


@contextlib.contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Raise what the system says of the disk as an error of the store."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StoreUnavailable(f"tiers.disk_path: expected a disk that works, got {path}: {reason}") from error
