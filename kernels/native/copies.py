"""Calls the copies of `copies.cpp`, which go past the caches and read bytes once where a checksum reads them again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_CHECKSUM_BYTES = 16
_STRIPE_BYTES, _ALIGNMENT, _MOST_SHORT_BYTES = 64, 32, 240
# Smaller copies are read again before they leave the caches.
LEAST_FILLED_BYTES = 4 << 20
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class ObjectFiles(NamedTuple):
    """The files of objects, which are read and written in two parts.

    Attributes:
        heads: descriptor of the file with what comes first, and each object's checksum behind that.
        bodies: descriptor of the file with the rest.
        head_bytes: bytes of what comes first, without the checksum.
    """

    heads: int
    bodies: int
    head_bytes: int


class NativeCopies:
    """Copies of blocks. Checksums are XXH3 with 128 bits; what has 240 bytes or less is declined, since XXH3 is another
    algorithm there.

    The interpreter's lock is free meanwhile. Several threads may call it at once.

    Args:
        library: of `load_library`.
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
        """Copy two parts into one memory, with the checksum of both behind them.

        Args:
            head: what comes first.
            body: contiguous bytes behind it.
            target: contiguous uint8 `[len(head) + len(body) + 16]`.

        Returns:
            Whether it did: the head must be whole stripes of 64 bytes, and the target aligned to 32.

        Raises:
            ValueError: the target has another size, is not contiguous, or can't be written.
        """
        source, address = np.frombuffer(body, np.uint8), target.ctypes.data
        num_bytes = len(head) + source.nbytes + _CHECKSUM_BYTES
        if target.nbytes != num_bytes or not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError(f"target: expected {num_bytes} writable bytes in one piece, got {target.nbytes} or others")
        is_long = len(head) + source.nbytes > _MOST_SHORT_BYTES
        if not is_long or len(head) % _STRIPE_BYTES or address % _ALIGNMENT:
            return False
        self._copy_checked(head, len(head), source.ctypes.data, source.nbytes, address)
        return True

    def read_checked(
        self, files: ObjectFiles, places: Sequence[tuple[int, int, int]], targets: Sequence[memoryview]
    ) -> list[tuple[int, bytes | None]] | None:
        """Read objects that end with a checksum.

        Args:
            files: where they are.
            places: of each its position in the file of heads, that in the file of bodies, and its bytes, checksum
                included.
            targets: writable memory for each, at least of its size.

        Returns:
            For each the bytes there were of it from its beginning on, and the checksum that it should end with; None
            instead of that where it is cut. None if it read nothing: an object is too short, or a target is not aligned
            to 32.

        Raises:
            OSError: reading fails.
            ValueError: a target is too small, or heads are not whole stripes of 64 bytes.
        """
        _require_stripes(files)
        wanted = np.array(places, np.int64).reshape(-1, 3).T.copy()  # positions, then sizes
        sizes = wanted[2]
        addresses = np.array([ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in targets], np.int64)
        if any(each.nbytes < size for each, size in zip(targets, sizes, strict=True)):
            raise ValueError("targets: expected memory of the objects' sizes, got less")
        least_bytes = max(_MOST_SHORT_BYTES + 1, files.head_bytes) + _CHECKSUM_BYTES
        if (sizes < least_bytes).any() or (addresses % _ALIGNMENT).any():
            return None
        counts, digests = np.zeros(len(places), np.int64), np.zeros((len(places), _CHECKSUM_BYTES), np.uint8)
        given = (each.ctypes.data for each in (*wanted, addresses, counts, digests))
        if failure := self._read_checked(*files, len(places), *given):
            raise OSError(-failure, os.strerror(-failure))
        is_whole = counts == sizes
        digest_of = (digest.tobytes() if whole else None for digest, whole in zip(digests, is_whole, strict=True))
        return list(zip(counts.tolist(), digest_of, strict=True))

    def write_checked(
        self, files: ObjectFiles, positions: Sequence[tuple[int, int]], objects: Sequence[tuple[bytes, memoryview]]
    ) -> bool:
        """Write objects: heads with the object's checksum behind them, and bodies, each with zeros up to the end of its
        last page.

        Args:
            files: where they go.
            positions: of each its positions in the file of heads and in that of bodies, at pages.
            objects: of each its head, and contiguous bytes behind it.

        Returns:
            Whether it did: an object of 240 bytes or less is declined.

        Raises:
            OSError: writing fails. Parts may be written.
            ValueError: a head has another size, or is not whole stripes of 64 bytes.
        """
        _require_stripes(files)
        heads = [head for head, _ in objects]
        if any(len(head) != files.head_bytes for head in heads):
            raise ValueError(f"objects: expected heads of {files.head_bytes} bytes, got others")
        bodies = [np.frombuffer(body, np.uint8) for _, body in objects]
        sizes = [body.size for body in bodies]
        if any(files.head_bytes + size <= _MOST_SHORT_BYTES for size in sizes):
            return False
        addresses = [body.__array_interface__["data"][0] for body in bodies]
        of_heads, of_bodies = zip(*positions, strict=True) if positions else ((), ())
        numbers = [(_INT * len(each))(*each) for each in (of_heads, of_bodies, addresses, sizes)]
        pointers = (ctypes.c_char_p * len(heads))(*heads)
        if failure := self._write_checked(*files, len(objects), *numbers[:2], pointers, *numbers[2:]):
            raise OSError(-failure, os.strerror(-failure))
        return True

    def fill(self, blocks: npt.NDArray[np.uint8], ids: Sequence[int], payloads: Sequence[memoryview]) -> bool:
        """Copy contiguous bytes into blocks of a pool, whose pieces may lie apart.

        Args:
            blocks: uint8 `[num_blocks, ..., piece_bytes]`; pieces are contiguous, and equally far from each other.
            ids: the blocks to fill.
            payloads: the bytes of each.

        Returns:
            Whether it did: pieces must be whole stripes of 64 bytes, aligned to 32, and together `LEAST_FILLED_BYTES`.

        Raises:
            ValueError: a payload has another size, there is no such block, or blocks can't be written.
        """
        block_bytes = blocks[0].nbytes
        if not blocks.flags.writeable or any(each.nbytes != block_bytes for each in payloads):
            raise ValueError(f"blocks: expected writable ones of {block_bytes} bytes, got other payloads or blocks")
        if any(not 0 <= each < len(blocks) for each in ids) or len(ids) != len(payloads):
            raise ValueError(f"blocks: expected ids below {len(blocks)}, one for each payload, got others")
        pieces = _pieces_of(blocks[0])
        targets = blocks.ctypes.data + np.array(ids, np.int64) * blocks.strides[0]
        if pieces is None or len(ids) * block_bytes < LEAST_FILLED_BYTES or (targets % _ALIGNMENT).any():
            return False
        sources = np.array([np.frombuffer(each, np.uint8).ctypes.data for each in payloads], np.int64)
        self._fill(len(ids), sources.ctypes.data, targets.ctypes.data, *pieces)
        return True


def _require_stripes(files: ObjectFiles) -> None:
    if files.head_bytes % _STRIPE_BYTES:
        raise ValueError(f"head_bytes: expected whole stripes of {_STRIPE_BYTES} bytes, got {files.head_bytes}")


def _pieces_of(block: npt.NDArray[np.uint8]) -> tuple[int, int, int] | None:
    """Return the number of a block's pieces, their bytes and their distance; None if they are not alike."""
    num_pieces, piece_bytes, stride = 1, block.shape[-1], block.shape[-1]
    if block.strides[-1] != 1:
        return None
    for size, distance in zip(block.shape[-2::-1], block.strides[-2::-1], strict=True):
        if size == 1:
            continue
        if num_pieces == 1:
            stride = distance
        elif distance != num_pieces * stride:
            return None
        num_pieces *= size
    if piece_bytes % _STRIPE_BYTES or stride % _ALIGNMENT:
        return None
    return num_pieces, piece_bytes, stride
