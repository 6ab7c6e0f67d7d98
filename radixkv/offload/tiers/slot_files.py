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
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

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
        head_room: bytes of a slot in the file `heads`, for the head and the checksum; whole pages.
        body_room: bytes of a slot in the file `blocks`, which has the bodies; whole pages.
    """

    head_bytes: int
    head_room: int
    body_room: int

    @classmethod
    def of(cls, object_bytes: int, payload_bytes: int) -> SlotSizes:
        """Return the sizes for objects of at most `object_bytes`, of which `payload_bytes` are K and V.

        >>> SlotSizes.of(1_048_976, 1_048_576)
        SlotSizes(head_bytes=384, head_room=4096, body_room=1048576)
        """
        num_bytes = object_bytes - CHECKSUM_BYTES
        is_short = payload_bytes < _STRIPE_BYTES  # rounding the head up would take more than the payload has
        head_bytes = HEAD_BYTES if is_short else _round_up(num_bytes - payload_bytes, _STRIPE_BYTES)
        return cls(head_bytes, _round_up(head_bytes + CHECKSUM_BYTES), _round_up(num_bytes - head_bytes))

    @property
    def slot_bytes(self) -> int:
        """Size of a slot in bytes."""
        return self.head_room + self.body_room

    @property
    def object_sizes(self) -> range:
        """Range of the object sizes that fit into a slot."""
        min_bytes = self.head_bytes + CHECKSUM_BYTES
        return range(min_bytes, min_bytes + self.body_room + 1)

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
            self._rooms = dict(zip(files, (_LINE.itemsize, sizes.head_room, sizes.body_room), strict=True))
            # If the index is shorter, its missing lines are those of free slots.
            self.num_slots = min(max_slots, *(os.fstat(each).st_size // self._rooms[each] for each in files[1:]))
            self._truncate()
            on_error.pop_all()  # everything is open
        self._object_files = ObjectFiles(self._heads, self._blocks, sizes.head_bytes)

    def close(self) -> None:
        """Write everything to the disk, and close the files."""
        for file in self._rooms:
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
        wanted = min(max(1, _GROWTH_BYTES // self._sizes.slot_bytes), self._max_slots - self.num_slots)
        while wanted > 0:
            try:
                for file, room in self._rooms.items():
                    os.posix_fallocate(file, self.num_slots * room, wanted * room)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._truncate()
                wanted //= 2
                continue
            new = range(self.num_slots, self.num_slots + wanted)
            self.num_slots += wanted
            return new
        return range(0)

    def _truncate(self) -> None:
        """Free the space beyond the last slot."""
        for file, room in self._rooms.items():
            os.ftruncate(file, self.num_slots * room)

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
        done = 0
        while done < len(data) + len(padding):
            done += os.pwritev(file, [data[done:], padding[max(0, done - len(data)) :]], position + done)

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
        done = 0
        while done < len(data):
            done += os.pwrite(self._index, data[done:], done)

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
        order = sorted(range(len(wanted)), key=lambda each: wanted[each])
        for run in _runs(wanted[each][0] for each in order)[1:]:
            for file in (self._heads, self._blocks):
                room = self._rooms[file]
                os.posix_fadvise(file, run.start * room, len(run) * room, os.POSIX_FADV_WILLNEED)
        start = self._sizes.head_room - self._sizes.head_bytes
        locations = [(*self._positions(wanted[each][0]), wanted[each][1]) for each in order]
        targets = [buffers[each][start:] for each in order]
        results = None if self._native is None else self._native.read_checked(self._object_files, locations, targets)
        if results is None:
            results = [self._read(*location, target) for location, target in zip(locations, targets, strict=True)]
        by_index = dict(zip(order, results, strict=True))
        return [(buffer[start:][: by_index[index][0]], by_index[index][1]) for index, buffer in enumerate(buffers)]

    def _read(
        self, head_position: int, body_position: int, num_bytes: int, target: memoryview
    ) -> tuple[int, bytes | None]:
        """Return the number of bytes read, and the checksum; None if the object is truncated."""
        size = self._sizes.head_bytes
        end = num_bytes - CHECKSUM_BYTES
        head = bytearray(size + CHECKSUM_BYTES)
        count = _read_all(self._heads, memoryview(head), head_position)
        target[:size] = head[:size]
        if count < len(head):
            return min(count, size), None
        count = size + _read_all(self._blocks, target[size:end], body_position)
        if count < end:
            return count, None
        target[end:num_bytes] = head[size:]
        return num_bytes, checksum_of(target[:num_bytes])

    def _positions(self, slot: int) -> tuple[int, int]:
        """Return where a slot begins in the file `heads`, and in the file `blocks`."""
        return slot * self._sizes.head_room, slot * self._sizes.body_room


def _round_up(num_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-num_bytes // unit) * unit


def _split(first: bytes, rest: memoryview, size: int) -> tuple[bytes, memoryview]:
    """Move bytes between two parts of an object, so that the first has this size."""
    more = size - len(first)
    return (first + rest[:more], rest[more:]) if more >= 0 else (first[:size], memoryview(first[size:] + rest))


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
    done = 0
    while done < len(target) and (count := os.preadv(file, [target[done:]], position + done)):
        done += count
    return done
