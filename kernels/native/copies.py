"""Calls the copies of `copies.cpp`, which go past the caches and read bytes once where a checksum reads them again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_CHECKSUM_BYTES = 16
_STRIPE_BYTES, _ALIGNMENT, _MOST_SHORT_BYTES = 64, 32, 240
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class NativeCopies:
    """Copies of blocks. Checksums are XXH3 with 128 bits, which the library takes otherwise of 240 bytes and less.

    The interpreter's lock is free meanwhile. Threads may call it at a time.

    Args:
        library: of `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy_checked = library.radixkv_copy_checked
        self._copy_checked.argtypes, self._copy_checked.restype = (_POINTER, _INT, _POINTER, _INT, _POINTER), None
        self._read_checked = library.radixkv_read_checked
        self._read_checked.argtypes, self._read_checked.restype = (ctypes.c_int, _INT, *[_POINTER] * 5), _INT
        self._copy_into_pieces = library.radixkv_copy_into_pieces
        self._copy_into_pieces.argtypes, self._copy_into_pieces.restype = (_POINTER, *[_INT] * 3, _POINTER), None

    def copy_checked(self, head: bytes, body: memoryview, target: npt.NDArray[np.uint8]) -> bool:
        """Copy two parts into one memory, with the checksum of both behind them.

        Args:
            head: what comes first.
            body: contiguous bytes behind it.
            target: contiguous uint8 `[len(head) + len(body) + 16]`.

        Returns:
            Whether it did: the head must be whole stripes of 64 bytes, and the target aligned to 32.
        """
        source, address = np.frombuffer(body, np.uint8), target.ctypes.data
        assert target.nbytes == len(head) + source.nbytes + _CHECKSUM_BYTES, "memory of another size"
        is_long = len(head) + source.nbytes > _MOST_SHORT_BYTES
        if not is_long or len(head) % _STRIPE_BYTES or address % _ALIGNMENT:
            return False
        self._copy_checked(head, len(head), source.ctypes.data, source.nbytes, address)
        return True

    def read_checked(
        self, file: int, places: Sequence[tuple[int, int]], targets: Sequence[memoryview]
    ) -> list[tuple[int, bytes | None]] | None:
        """Read objects that end with a checksum.

        Args:
            file: descriptor of an open file.
            places: position and bytes of each object.
            targets: writable memory for each, at least of its size.

        Returns:
            For each the bytes there were of it, and the checksum that it should end with; None instead of that where
            it is cut. None if it read nothing: an object is too short, or its target is not aligned to 32.

        Raises:
            OSError: reading fails.
        """
        wanted = np.array(places, np.int64).reshape(-1, 2).T.copy()  # positions, then sizes
        addresses = np.array([ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in targets], np.int64)
        assert all(each.nbytes >= size for each, size in zip(targets, wanted[1], strict=True)), "memory is too small"
        if (wanted[1] <= _MOST_SHORT_BYTES + _CHECKSUM_BYTES).any() or (addresses % _ALIGNMENT).any():
            return None
        counts, digests = np.zeros(len(places), np.int64), np.zeros((len(places), _CHECKSUM_BYTES), np.uint8)
        given = (each.ctypes.data for each in (*wanted, addresses, counts, digests))
        if failure := self._read_checked(file, len(places), *given):
            raise OSError(-failure, os.strerror(-failure))
        is_whole = counts == wanted[1]
        digest_of = (digest.tobytes() if whole else None for digest, whole in zip(digests, is_whole, strict=True))
        return list(zip(counts.tolist(), digest_of, strict=True))

    def fill(self, block: npt.NDArray[np.uint8], payload: memoryview) -> bool:
        """Copy contiguous bytes into a block of a pool, whose pieces may lie apart.

        Args:
            block: uint8 `[..., piece_bytes]`; the pieces are contiguous, and equally far from each other.
            payload: as many bytes.

        Returns:
            Whether it did: pieces must be whole stripes of 64 bytes, aligned to 32.
        """
        source = np.frombuffer(payload, np.uint8)
        assert source.nbytes == block.nbytes, "bytes of another size"
        pieces = _pieces_of(block)
        if pieces is None:
            return False
        num_pieces, piece_bytes, stride = pieces
        self._copy_into_pieces(source.ctypes.data, num_pieces, piece_bytes, stride, block.ctypes.data)
        return True


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
    if piece_bytes % _STRIPE_BYTES or stride % _ALIGNMENT or block.ctypes.data % _ALIGNMENT:
        return None
    return num_pieces, piece_bytes, stride
