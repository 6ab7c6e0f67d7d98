"""Calls the copy of `checked_copy.cpp`, which reads bytes once where a copy and a checksum would read them twice."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

_CHECKSUM_BYTES = 16
_STRIPE_BYTES, _ALIGNMENT, _MOST_SHORT_BYTES = 64, 32, 240
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class NativeCopy:
    """Copies two parts into one memory, with the XXH3 checksum of 128 bits of both behind them.

    The interpreter's lock is free meanwhile. Threads may call it at a time.

    Args:
        library: of `load_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy = library.radixkv_checked_copy
        self._copy.argtypes, self._copy.restype = (_POINTER, _INT, _POINTER, _INT, _POINTER), None

    def takes(self, head: bytes, body: memoryview, target: npt.NDArray[np.uint8]) -> bool:
        """Whether it copies these: the head is whole stripes of 64 bytes, and the target aligned to 32.

        The library takes other checksums of 240 bytes and less.
        """
        is_long = len(head) + body.nbytes > _MOST_SHORT_BYTES
        return is_long and len(head) % _STRIPE_BYTES == 0 and target.ctypes.data % _ALIGNMENT == 0

    def __call__(self, head: bytes, body: memoryview, target: npt.NDArray[np.uint8]) -> None:
        """Copy what it `takes`.

        Args:
            head: what comes first.
            body: contiguous bytes behind it.
            target: contiguous uint8 `[len(head) + len(body) + 16]`.
        """
        source = np.frombuffer(body, np.uint8)
        assert target.nbytes == len(head) + source.nbytes + _CHECKSUM_BYTES, "memory of another size"
        self._copy(head, len(head), source.ctypes.data, source.nbytes, target.ctypes.data)
