"""Python interface of `copies.cpp`: copies that bypass the caches, and compute checksums in the same pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_CHECKSUM_BYTES = 16
_STRIPE_BYTES, _ALIGNMENT_BYTES, _MAX_SHORT_BYTES = 64, 32, 240
# Smaller copies are likely to be read while they are still in the caches, so `fill` leaves them to NumPy.
MIN_FILLED_BYTES = 4 << 20
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class ObjectFiles(NamedTuple):
    """The two files of objects: an object is stored as a head and a body.

    Attributes:
        heads: descriptor of the file with the head of each object, followed by the object's checksum.
        bodies: descriptor of the file with the rest of each object.
        head_bytes: bytes of a head, without the checksum.
    """

    heads: int
    bodies: int
    head_bytes: int


class NativeCopies:
    """Copies of blocks, with checksums of 128 bits (XXH3).

    Objects of 240 bytes or less are not supported, since XXH3 uses another algorithm for them. Methods are thread-safe,
    and release the GIL while they copy.

    Args:
        library: returned by `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy_checked = library.radixkv_copy_checked
        self._copy_checked.argtypes, self._copy_checked.restype = (_POINTER, _INT, _POINTER, _INT, _POINTER), None
        self._read_checked = library.radixkv_read_checked
        files = (ctypes.c_int, ctypes.c_int, _INT)
        self._read_checked.argtypes, self._read_checked.restype = (*files, _INT, *[_POINTER] * 6), _INT
        self._write_checked = library.radixkv_write_checked
        self._write_checked.argtypes, self._write_checked.restype = (*files, _INT, *[_POINTER] * 5), _INT
        self._fill = library.radixkv_fill
        self._fill.argtypes, self._fill.restype = (_INT, _POINTER, _POINTER, *[_INT] * 3), None

    def copy_checked(self, head: bytes, body: memoryview, target: npt.NDArray[np.uint8]) -> bool:
        """Copy head and body into one array, followed by the checksum of both.

        Args:
            head: the first bytes.
            body: the other bytes, contiguous.
            target: contiguous uint8 `[len(head) + len(body) + 16]`.

        Returns:
            Whether the copy was made. It is not if the size of the head is not a multiple of 64 bytes, the target is
            not aligned to 32 bytes, or both parts together have 240 bytes or less.

        Raises:
            ValueError: the target has another size, is not contiguous, or can't be written.
        """
        source, address = np.frombuffer(body, np.uint8), target.ctypes.data
        num_bytes = len(head) + source.nbytes + _CHECKSUM_BYTES
        if target.nbytes != num_bytes or not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError(f"target: expected {num_bytes} writable contiguous bytes, got {_describe(target)}")
        is_long = len(head) + source.nbytes > _MAX_SHORT_BYTES
        if not is_long or len(head) % _STRIPE_BYTES or address % _ALIGNMENT_BYTES:
            return False
        self._copy_checked(head, len(head), source.ctypes.data, source.nbytes, address)
        return True

    def read_checked(
        self, files: ObjectFiles, locations: Sequence[tuple[int, int, int]], targets: Sequence[memoryview]
    ) -> list[tuple[int, bytes | None]] | None:
        """Read objects that end with a checksum.

        Args:
            files: the files of the objects.
            locations: for each object its offset in the file of heads, its offset in the file of bodies, and its number
                of bytes, including the checksum.
            targets: writable memory for each object, at least of its size.

        Returns:
            For each object the number of bytes that were read, and the checksum of its contents, with which it should
            end, or None if the object is truncated. None instead of a list, and nothing is read, if an object is too
            short or a target is not aligned to 32 bytes.

        Raises:
            OSError: reading failed.
            ValueError: a target is too small, or the size of heads is not a multiple of 64 bytes.
        """
        _require_stripes(files)
        head_offsets, body_offsets, sizes = np.array(locations, np.int64).reshape(-1, 3).T.copy()
        addresses = np.array([ctypes.addressof(ctypes.c_char.from_buffer(target)) for target in targets], np.int64)
        if any(target.nbytes < size for target, size in zip(targets, sizes, strict=True)):
            raise ValueError("targets: each must have at least the size of its object")
        min_bytes = max(_MAX_SHORT_BYTES + 1, files.head_bytes) + _CHECKSUM_BYTES
        if (sizes < min_bytes).any() or (addresses % _ALIGNMENT_BYTES).any():
            return None
        counts, digests = np.zeros(len(locations), np.int64), np.zeros((len(locations), _CHECKSUM_BYTES), np.uint8)
        pointers = (array.ctypes.data for array in (head_offsets, body_offsets, sizes, addresses, counts, digests))
        if failure := self._read_checked(*files, len(locations), *pointers):
            raise OSError(-failure, os.strerror(-failure))
        are_whole = counts == sizes
        checksums = [
            digest.tobytes() if is_whole else None for digest, is_whole in zip(digests, are_whole, strict=True)
        ]
        return list(zip(counts.tolist(), checksums, strict=True))

    def write_checked(
        self, files: ObjectFiles, offsets: Sequence[tuple[int, int]], objects: Sequence[tuple[bytes, memoryview]]
    ) -> bool:
        """Write objects: bodies, and heads followed by the object's checksum, both padded with zeros to whole pages.

        Args:
            files: the files of the objects.
            offsets: for each object its offsets in the file of heads and in the file of bodies, multiples of a page.
            objects: for each object its head, and its body in contiguous bytes.

        Returns:
            Whether the objects were written. They are not if one has 240 bytes or less.

        Raises:
            OSError: writing failed. Some parts may have been written.
            ValueError: a head does not have `files.head_bytes` bytes, or that is not a multiple of 64.
        """
        _require_stripes(files)
        heads = [head for head, _ in objects]
        if any(len(head) != files.head_bytes for head in heads):
            raise ValueError(f"objects: expected heads of {files.head_bytes} bytes, got {sorted({*map(len, heads)})}")
        bodies = [np.frombuffer(body, np.uint8) for _, body in objects]
        sizes = [body.size for body in bodies]
        if any(files.head_bytes + size <= _MAX_SHORT_BYTES for size in sizes):
            return False
        body_addresses = [body.__array_interface__["data"][0] for body in bodies]
        head_offsets, body_offsets = zip(*offsets, strict=True) if offsets else ((), ())
        offset_arrays = [(_INT * len(numbers))(*numbers) for numbers in (head_offsets, body_offsets)]
        head_array = (ctypes.c_char_p * len(heads))(*heads)
        body_arrays = [(_INT * len(numbers))(*numbers) for numbers in (body_addresses, sizes)]
        if failure := self._write_checked(*files, len(objects), *offset_arrays, head_array, *body_arrays):
            raise OSError(-failure, os.strerror(-failure))
        return True

    def fill(self, blocks: npt.NDArray[np.uint8], ids: Sequence[int], payloads: Sequence[memoryview]) -> bool:
        """Copy contiguous bytes into blocks of a pool, which may be strided.

        Args:
            blocks: uint8 `[num_blocks, ..., piece_bytes]`; pieces are contiguous, with a constant stride in a block.
            ids: the blocks to fill.
            payloads: the bytes of each block.

        Returns:
            Whether the blocks were filled. They are not if the size of a piece is not a multiple of 64 bytes, pieces
            are not aligned to 32 bytes or have no constant stride, or there are fewer than `MIN_FILLED_BYTES` in total.

        Raises:
            ValueError: a payload has another size, a block does not exist, there is not one payload per id, or
                `blocks` is read-only.
        """
        block_bytes = blocks[0].nbytes
        if not blocks.flags.writeable or any(payload.nbytes != block_bytes for payload in payloads):
            raise ValueError(f"blocks: expected writable blocks, and payloads of {block_bytes} bytes for them")
        if any(not 0 <= block_id < len(blocks) for block_id in ids) or len(ids) != len(payloads):
            raise ValueError(f"ids: expected {len(payloads)} block ids from 0 to {len(blocks) - 1}, got {list(ids)}")
        piece_layout = _piece_layout(blocks[0])
        targets = blocks.ctypes.data + np.array(ids, np.int64) * blocks.strides[0]
        if piece_layout is None or len(ids) * block_bytes < MIN_FILLED_BYTES or (targets % _ALIGNMENT_BYTES).any():
            return False
        sources = np.array([np.frombuffer(payload, np.uint8).ctypes.data for payload in payloads], np.int64)
        self._fill(len(ids), sources.ctypes.data, targets.ctypes.data, *piece_layout)
        return True


def _require_stripes(files: ObjectFiles) -> None:
    if files.head_bytes % _STRIPE_BYTES:
        raise ValueError(f"head_bytes: expected a multiple of {_STRIPE_BYTES}, got {files.head_bytes}")


def _describe(array: npt.NDArray[np.uint8]) -> str:
    access = "writable" if array.flags.writeable else "read-only"
    order = "contiguous" if array.flags.c_contiguous else "strided"
    return f"{array.nbytes} {access} {order} bytes"


def _piece_layout(block: npt.NDArray[np.uint8]) -> tuple[int, int, int] | None:
    """Return number, size and stride of the pieces of a block; None if the stride is not constant or not aligned."""
    num_pieces, piece_bytes, stride = 1, block.shape[-1], block.shape[-1]
    if block.strides[-1] != 1:
        return None
    # The dimensions before the last one, from the innermost to the outermost.
    for size, dimension_stride in zip(block.shape[-2::-1], block.strides[-2::-1], strict=True):
        if size == 1:
            continue
        if num_pieces == 1:
            stride = dimension_stride
        elif dimension_stride != num_pieces * stride:
            return None
        num_pieces *= size
    if piece_bytes % _STRIPE_BYTES or stride % _ALIGNMENT_BYTES:
        return None
    return num_pieces, piece_bytes, stride
