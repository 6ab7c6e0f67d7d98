"""The files of the disk store: slots of whole pages, in two files for the first bytes and the rest of each object, and
an index with a line per slot.

    heads    [ head of an object, its checksum, zeros        )[ ...
    blocks   [ body of the object, zeros or older bytes      )[ ...
    index    [ key 32 | generation 8 | serial 8 | bytes 8 | unused 8 )[ ...        serial 0: the slot is free

Here, the head of an object is everything before K and V: its `ObjectHead`, its tokens and padding. The body is K and V.
An encrypted object is split at the same position. Because of the split, K and V begin at a page boundary; if they are
as large as a huge page, they can fill one.

An object is written in place, and its line after it. If the process is killed during a write, the checksum or the key
of the object reveals that when it is read. Therefore nothing has to be repaired, and apart from `close` only deletions
are synced to the disk. A power failure may leave two lines with the same key, of which the earlier one is cleared at
the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from radixkv.kernels.native.copies import NativeCopies, ObjectFiles
from radixkv.offload.block_keys import KEY_BYTES
from radixkv.offload.tiers.block_object import CHECKSUM_BYTES, HEAD_BYTES, BlockObject, checksum_of

PAGE_BYTES = 4096
_LINE = np.dtype(
    [("key", f"V{KEY_BYTES}"), ("generation", "<u8"), ("serial", "<u8"), ("bytes", "<u8"), ("unused", "V8")]
)
_PACKED = Struct(f"<{KEY_BYTES}sQQQ8x")  # one line, in the same layout
_GROWTH_BYTES = 64 << 20
_WRITE_BYTES = 2 << 20  # of an object per write; smaller pieces would need more calls
_STRIPE_BYTES = 64  # XXH3 consumes stripes of this size, so heads are multiples of it
_FULL_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

Lines = npt.NDArray[Any]


class Line(NamedTuple):
    """The index line of a slot that holds an object.

    Attributes:
        slot: index of the slot.
        key, generation: see `ObjectHead`.
        serial: larger than those of all lines that were written before.
        num_bytes: bytes of the object.
    """

    slot: int
    key: bytes
    generation: int
    serial: int
    num_bytes: int


class SlotSizes(NamedTuple):
    """The parts of a slot, and of an object in it.

    Attributes:
        head_bytes: bytes of the head of an object, a multiple of 64.
        head_slot_bytes: bytes of a slot in the file `heads`, for the head and the checksum; whole pages.
        body_slot_bytes: bytes of a slot in the file `blocks`, which has the bodies; whole pages.
    """

    head_bytes: int
    head_slot_bytes: int
    body_slot_bytes: int

    @classmethod
    def of(cls, object_bytes: int, payload_bytes: int) -> SlotSizes:
        """Return the sizes for objects of at most `object_bytes`, of which `payload_bytes` are K and V.

        >>> SlotSizes.of(1_048_976, 1_048_576)
        SlotSizes(head_bytes=384, head_slot_bytes=4096, body_slot_bytes=1048576)
        """
        num_bytes = object_bytes - CHECKSUM_BYTES
        is_short = payload_bytes < _STRIPE_BYTES  # rounding the head up would take more than the payload has
        head_bytes = HEAD_BYTES if is_short else _round_up(num_bytes - payload_bytes, _STRIPE_BYTES)
        return cls(head_bytes, _round_up(head_bytes + CHECKSUM_BYTES), _round_up(num_bytes - head_bytes))

    @property
    def slot_bytes(self) -> int:
        """Size of a slot in bytes."""
        return self.head_slot_bytes + self.body_slot_bytes

    @property
    def object_sizes(self) -> range:
        """Range of the object sizes that fit into a slot."""
        min_bytes = self.head_bytes + CHECKSUM_BYTES
        return range(min_bytes, min_bytes + self.body_slot_bytes + 1)

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer into which an object is read so that its body is page-aligned."""
        return self.slot_bytes + PAGE_BYTES


class SlotFiles:
    """The files of a disk store. Different slots may be read and written concurrently; callers serialize other methods.

    Attributes:
        num_slots: slots for which space on the disk is allocated.

    Args:
        directory: the directory of the files, which are created if they do not exist.
        sizes: sizes of a slot.
        max_slots: maximum number of slots; longer files are truncated.
        native: reads and writes in C++, which is faster; None to use Python.

    Raises:
        OSError: the files can't be opened.
    """

    def __init__(self, directory: Path, sizes: SlotSizes, max_slots: int, native: NativeCopies | None = None) -> None:
        self._sizes = sizes
        self._max_slots = max_slots
        self._native = native
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with contextlib.ExitStack() as on_error:
            files = []
            for name in ("index", "heads", "blocks"):
                files.append(os.open(directory / name, flags, 0o600))
                on_error.callback(os.close, files[-1])
            self._index, self._heads, self._blocks = files
            self._slot_bytes = dict(
                zip(files, (_LINE.itemsize, sizes.head_slot_bytes, sizes.body_slot_bytes), strict=True)
            )
            # The files `heads` and `blocks` determine the number of slots. If the index is shorter, the missing lines
            # are those of free slots.
            self.num_slots = min(max_slots, *(os.fstat(each).st_size // self._slot_bytes[each] for each in files[1:]))
            self._truncate()
            on_error.pop_all()  # everything is open
        self._object_files = ObjectFiles(self._heads, self._blocks, sizes.head_bytes)

    def close(self) -> None:
        """Write everything to the disk, and close the files."""
        for file in self._slot_bytes:
            os.fsync(file)
            os.close(file)

    def lines(self) -> Lines:
        """Read the index. Complexity: reads 64 bytes per slot, all at once."""
        size = self.num_slots * _LINE.itemsize
        data = bytearray(size)
        _read_all(self._index, memoryview(data), 0)
        return np.frombuffer(data, _LINE)

    def grow(self) -> range:
        """Allocate more slots. Return them; none if `max_slots` is reached or the disk is full.

        Space is allocated before it is written, so that the disk does not become full in the middle of an object.

        Raises:
            OSError: an error other than a full disk.
        """
        num_new_slots = min(max(1, _GROWTH_BYTES // self._sizes.slot_bytes), self._max_slots - self.num_slots)
        while num_new_slots > 0:
            try:
                for file, slot_bytes in self._slot_bytes.items():
                    os.posix_fallocate(file, self.num_slots * slot_bytes, num_new_slots * slot_bytes)
            except OSError as error:
                if error.errno not in _FULL_DISK_ERRORS:
                    raise
                self._truncate()
                num_new_slots //= 2
                continue
            new_slots = range(self.num_slots, self.num_slots + num_new_slots)
            self.num_slots += num_new_slots
            return new_slots
        return range(0)

    def _truncate(self) -> None:
        """Free the space beyond the last slot."""
        for file, slot_bytes in self._slot_bytes.items():
            os.ftruncate(file, self.num_slots * slot_bytes)

    def write_objects(self, objects: Sequence[tuple[int, BlockObject]]) -> None:
        """Write each object into its slot, padded with zeros to whole pages.

        A page that is written in part would first be read from the disk.

        Raises:
            OSError: a write fails.
        """
        parts = [_split(*each.parts(), self._sizes.head_bytes) for _, each in objects]
        positions = [self._positions(slot) for slot, _ in objects]
        if self._native is not None and self._native.write_checked(self._object_files, positions, parts):
            return
        for (head_position, body_position), (head, body) in zip(positions, parts, strict=True):
            digest = xxh3_128(head)
            for start in range(0, len(body), _WRITE_BYTES):
                piece = body[start : start + _WRITE_BYTES]
                digest.update(piece)
                self._write(self._blocks, piece, body_position + start)
            self._write(self._heads, memoryview(head + digest.digest()), head_position)

    def _write(self, file: int, data: memoryview, position: int) -> None:
        padding = bytes(-len(data) % PAGE_BYTES)
        num_written = 0
        while num_written < len(data) + len(padding):
            rest_of_padding = padding[max(0, num_written - len(data)) :]
            num_written += os.pwritev(file, [data[num_written:], rest_of_padding], position + num_written)

    def write_lines(self, lines: Sequence[Line]) -> None:
        """Write index lines, those of adjacent slots in one write."""
        start = 0
        for end in range(1, len(lines) + 1):
            if end == len(lines) or lines[end].slot != lines[end - 1].slot + 1:
                packed = b"".join([_PACKED.pack(*line[1:]) for line in lines[start:end]])
                os.pwrite(self._index, packed, lines[start].slot * _LINE.itemsize)
                start = end

    def number_lines(self, slots: Sequence[int], first_serial: int) -> None:
        """Renumber the lines of slots in this order. Complexity: reads and writes the whole index."""
        lines = self.lines()
        lines["serial"][list(slots)] = np.arange(first_serial, first_serial + len(slots), dtype=np.uint64)
        data = memoryview(lines.tobytes())
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self._index, data[num_written:], num_written)

    def clear_lines(self, slots: Iterable[int]) -> None:
        """Clear the lines of slots. Not durable until `sync_lines`: a power failure may undo it."""
        for slot in slots:
            os.pwrite(self._index, bytes(_LINE.itemsize), slot * _LINE.itemsize)

    def sync_lines(self) -> None:
        """Wait until all lines are durable."""
        os.fdatasync(self._index)

    def read(
        self, wanted: Sequence[tuple[int, int]], buffers: Sequence[memoryview]
    ) -> list[tuple[memoryview, bytes | None]]:
        """Read objects into buffers, in the order of their slots.

        All runs of adjacent slots but the first one are announced with POSIX_FADV_WILLNEED, so that the disk queues
        their reads. Within a run the kernel reads ahead by itself; announcing adjacent slots one by one would read them
        into single pages, which takes three times as long.

        Args:
            wanted: slots and sizes of the objects; see `SlotSizes.object_sizes`.
            buffers: a page-aligned buffer of `SlotSizes.buffer_bytes` for each.

        Returns:
            For each object its bytes, fewer if a file is truncated, and its `checksum_of`, computed while the bytes are
            in the CPU cache; None for a truncated object.

        Raises:
            OSError: a read fails.
        """
        order = sorted(range(len(wanted)), key=lambda index: wanted[index])
        for run in _runs(wanted[index][0] for index in order)[1:]:
            for file in (self._heads, self._blocks):
                slot_bytes = self._slot_bytes[file]
                os.posix_fadvise(file, run.start * slot_bytes, len(run) * slot_bytes, os.POSIX_FADV_WILLNEED)
        start = self._sizes.head_slot_bytes - self._sizes.head_bytes  # in a buffer, so that the body is page-aligned
        locations = [(*self._positions(slot), num_bytes) for slot, num_bytes in map(wanted.__getitem__, order)]
        targets = [buffers[index][start:] for index in order]
        results = None if self._native is None else self._native.read_checked(self._object_files, locations, targets)
        if results is None:
            results = [self._read(*location, target) for location, target in zip(locations, targets, strict=True)]
        by_index = dict(zip(order, results, strict=True))
        objects = []
        for index, buffer in enumerate(buffers):
            num_bytes, checksum = by_index[index]
            objects.append((buffer[start : start + num_bytes], checksum))
        return objects

    def _read(
        self, head_position: int, body_position: int, num_bytes: int, target: memoryview
    ) -> tuple[int, bytes | None]:
        """Return the number of bytes read, and the checksum; None if the object is truncated."""
        head_bytes = self._sizes.head_bytes
        body_end = num_bytes - CHECKSUM_BYTES
        head = bytearray(head_bytes + CHECKSUM_BYTES)
        num_read = _read_all(self._heads, memoryview(head), head_position)
        target[:head_bytes] = head[:head_bytes]
        if num_read < len(head):
            return min(num_read, head_bytes), None
        num_read = head_bytes + _read_all(self._blocks, target[head_bytes:body_end], body_position)
        if num_read < body_end:
            return num_read, None
        target[body_end:num_bytes] = head[head_bytes:]
        return num_bytes, checksum_of(target[:num_bytes])

    def _positions(self, slot: int) -> tuple[int, int]:
        """Return where a slot begins in the file `heads`, and in the file `blocks`."""
        return slot * self._sizes.head_slot_bytes, slot * self._sizes.body_slot_bytes


def _round_up(num_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-num_bytes // unit) * unit


def _split(first: bytes, body: memoryview, first_bytes: int) -> tuple[bytes, memoryview]:
    """Move bytes between the two parts of an object, so that the first part has `first_bytes`."""
    num_moved = first_bytes - len(first)
    if num_moved >= 0:
        return first + body[:num_moved], body[num_moved:]
    return first[:first_bytes], memoryview(first[first_bytes:] + body)


def _runs(slots: Iterable[int]) -> list[range]:
    """Group sorted slots into runs of adjacent ones."""
    runs: list[range] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs


def _read_all(file: int, target: memoryview, position: int) -> int:
    """Read until the target is full or the file ends. Return the number of bytes read."""
    num_read = 0
    while num_read < len(target) and (count := os.preadv(file, [target[num_read:]], position + num_read)):
        num_read += count
    return num_read
