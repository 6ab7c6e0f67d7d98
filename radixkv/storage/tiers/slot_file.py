"""Two files: slots with one object each, and an index with a line for each slot.

    blocks   [ object, zeros or older bytes up to slot_bytes )[ object ... )[ ...
    index    [ key 32 | generation 8 | serial 8 | bytes 8 | 8 )[ ...        serial 0: the slot is free

Objects are written in place, then their line. Whatever a process that dies leaves half written, an object's checksum or
its key tells when it is read. So only deletions wait for the disk, and nothing is repaired. Of two lines with one key,
which a power failure may leave, the earlier one is cleared at the next start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.kernels.native.copies import NativeCopies
from radixkv.storage.tiers.block_key import KEY_BYTES
from radixkv.storage.tiers.block_object import BlockObject, checksum_of

PAGE_BYTES = 4096
_LINE = np.dtype([("key", f"V{KEY_BYTES}"), ("generation", "<u8"), ("serial", "<u8"), ("bytes", "<u8"), ("more", "V8")])
_PACKED = Struct(f"<{KEY_BYTES}sQQQ8x")  # the same, of one line
_GROWTH_BYTES = 64 << 20
_WRITE_BYTES = 2 << 20  # of one object in one write: every call takes time
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

Lines = npt.NDArray[Any]


class Line(NamedTuple):
    """The line of a slot with an object.

    Attributes:
        slot: its number.
        key, generation: see `ObjectHead`.
        serial: larger than those of all lines before.
        num_bytes: bytes of the object.
    """

    slot: int
    key: bytes
    generation: int
    serial: int
    num_bytes: int


class SlotFile:
    """Slots on a disk. Reads and writes of different slots may run at a time; growing and lines are the caller's turn.

    Attributes:
        num_slots: slots that have room on the disk.

    Args:
        directory: has the files, or will have them.
        slot_bytes: size of a slot, whole pages.
        max_slots: the bound; a longer file is cut.
        native: reads and writes in C++, which take 0.8 and 0.9 of the time; None for none.

    Raises:
        OSError: the files can't be opened.
    """

    def __init__(self, directory: Path, slot_bytes: int, max_slots: int, native: NativeCopies | None = None) -> None:
        self._slot_bytes, self._max_slots, self._native = slot_bytes, max_slots, native
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._index = os.open(directory / "index", flags, 0o600)
        try:
            self._blocks = os.open(directory / "blocks", flags, 0o600)
        except OSError:
            os.close(self._index)
            raise
        self.num_slots = min(os.fstat(self._blocks).st_size // slot_bytes, max_slots)
        os.ftruncate(self._blocks, self.num_slots * slot_bytes)
        os.ftruncate(self._index, self.num_slots * _LINE.itemsize)

    def close(self) -> None:
        """Write everything to the disk, and close the files."""
        for file in (self._blocks, self._index):
            os.fsync(file)
            os.close(file)

    def lines(self) -> Lines:
        """Read the index: one read of 64 bytes a slot."""
        size = self.num_slots * _LINE.itemsize
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size and (count := os.preadv(self._index, [view[done:]], done)):
            done += count
        return np.frombuffer(data, _LINE)

    def grow(self) -> range:
        """Take more room on the disk. Return the new slots; none at the bound, or if the disk is full.

        Room is taken before anything is written, so that a full disk is no surprise in the middle of an object.

        Raises:
            OSError: the disk fails otherwise.
        """
        wanted = min(max(1, _GROWTH_BYTES // self._slot_bytes), self._max_slots - self.num_slots)
        while wanted > 0:
            try:
                os.posix_fallocate(self._blocks, self.num_slots * self._slot_bytes, wanted * self._slot_bytes)
                os.posix_fallocate(self._index, self.num_slots * _LINE.itemsize, wanted * _LINE.itemsize)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                os.ftruncate(self._blocks, self.num_slots * self._slot_bytes)
                wanted //= 2
                continue
            new = range(self.num_slots, self.num_slots + wanted)
            self.num_slots += wanted
            return new
        return range(0)

    def write_objects(self, objects: Sequence[tuple[int, BlockObject]]) -> None:
        """Write objects, each into its slot, and zeros up to the end of their last pages. Raises as `write` does."""
        if self._native is not None:
            positions = [slot * self._slot_bytes for slot, _ in objects]
            if self._native.write_checked(self._blocks, positions, [each.parts() for _, each in objects]):
                return
        for slot, each in objects:
            self.write(slot, each.pieces())

    def write(self, slot: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Write an object into a slot, about 2 MiB at a time, and zeros up to the end of its last page.

        Whole pages alone are written: of a page that is written in part the rest would first be read from the disk.

        Raises:
            OSError: the disk fails, or is full although room was taken.
        """
        position, left = slot * self._slot_bytes, list[memoryview]()
        for piece in pieces:
            left.append(memoryview(piece))
            size = sum(view.nbytes for view in left)
            if size >= _WRITE_BYTES:
                whole = size // PAGE_BYTES * PAGE_BYTES
                views, left = _split(left, whole)
                self._write(views, position)
                position += whole
        padding = -sum(view.nbytes for view in left) % PAGE_BYTES
        self._write([*left, memoryview(bytes(padding))], position)

    def _write(self, views: list[memoryview], position: int) -> None:
        while views:
            count = os.pwritev(self._blocks, views, position)
            position += count
            _, views = _split(views, count)

    def write_lines(self, lines: Sequence[Line]) -> None:
        """Write lines, those of neighbors in one write."""
        start = 0
        for end in range(1, len(lines) + 1):
            if end == len(lines) or lines[end].slot != lines[end - 1].slot + 1:
                packed = b"".join([_PACKED.pack(*line[1:]) for line in lines[start:end]])
                os.pwrite(self._index, packed, lines[start].slot * _LINE.itemsize)
                start = end

    def number_lines(self, slots: Sequence[int], first_serial: int) -> None:
        """Give the lines of slots serials in this order. Complexity: a read and a write of 64 bytes a slot."""
        lines = self.lines()
        lines["serial"][list(slots)] = np.arange(first_serial, first_serial + len(slots), dtype=np.uint64)
        data, done = memoryview(lines.tobytes()), 0
        while done < len(data):
            done += os.pwrite(self._index, data[done:], done)

    def clear_lines(self, slots: Iterable[int]) -> None:
        """Make slots free; after a power failure perhaps."""
        for slot in slots:
            os.pwrite(self._index, bytes(_LINE.itemsize), slot * _LINE.itemsize)

    def sync_lines(self) -> None:
        """Wait until the disk has all lines, also for after a power failure."""
        os.fdatasync(self._index)

    def read(
        self, wanted: Sequence[tuple[int, int]], buffers: Sequence[memoryview]
    ) -> list[tuple[memoryview, bytes | None]]:
        """Read objects into buffers of a slot each, in the order of the disk.

        The system reads ahead. It is told of strangers, so that the disk has them in its queue; of neighbors it is not,
        since what it is told of is read into single pages, which takes three times as long.

        Args:
            wanted: slots and bytes of the objects.
            buffers: one for each, of `slot_bytes`.

        Returns:
            What there is of each, and `checksum_of` it while it is in the processor's cache; None if it is cut.

        Raises:
            OSError: the disk fails.
        """
        order = sorted(range(len(wanted)), key=lambda each: wanted[each])
        for run in self._runs(order, wanted)[1:]:
            start, size = wanted[run[0]][0] * self._slot_bytes, len(run) * self._slot_bytes
            os.posix_fadvise(self._blocks, start, size, os.POSIX_FADV_WILLNEED)
        places = [(wanted[each][0] * self._slot_bytes, wanted[each][1]) for each in order]
        ordered = [buffers[each] for each in order]
        found = None if self._native is None else self._native.read_checked(self._blocks, places, ordered)
        if found is None:
            found = [self._read(*place, buffer) for place, buffer in zip(places, ordered, strict=True)]
        by_index = dict(zip(order, found, strict=True))
        return [(buffer[: by_index[index][0]], by_index[index][1]) for index, buffer in enumerate(buffers)]

    def _read(self, position: int, num_bytes: int, buffer: memoryview) -> tuple[int, bytes | None]:
        """Return the bytes that there were of an object, and its checksum if it is whole."""
        total = 0
        while total < num_bytes and (count := os.preadv(self._blocks, [buffer[total:num_bytes]], position + total)):
            total += count
        return total, checksum_of(buffer[:total]) if total == num_bytes else None

    def _runs(self, order: Sequence[int], wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        runs: list[list[int]] = []
        for each in order:
            if runs and wanted[runs[-1][-1]][0] + 1 == wanted[each][0]:
                runs[-1].append(each)
            else:
                runs.append([each])
        return runs


def _split(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first bytes of buffers, and what is behind them; no view of either is empty."""
    front, behind = [], []
    for view in views:
        num_bytes = min(count, view.nbytes)
        if num_bytes:
            front.append(view[:num_bytes])
        if num_bytes < view.nbytes:
            behind.append(view[num_bytes:])
        count -= num_bytes
    return front, behind
