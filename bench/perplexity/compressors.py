"""Sizes of texts by gzip and xz: alone, and after the training text, which they may then refer to."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Mapping

_GZIP_WINDOW = 32_768  # bytes; gzip can't refer to more
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]  # its window holds 64 MB


def gzip_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits of a text by deflate at its best, without headers.

    Args:
        text: to compress.
        before: known to both sides; its last 32 KiB are a dictionary.
    """
    dictionary = before[-_GZIP_WINDOW:]
    packer = zlib.compressobj(9, wbits=-15, zdict=dictionary) if dictionary else zlib.compressobj(9, wbits=-15)
    return 8 * len(packer.compress(text) + packer.flush())


def xz_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits that a text adds to what was compressed before it, by LZMA2 at its best, without headers.

    Args:
        text: to compress.
        before: known to both sides, up to 64 MB.
    """
    return _xz_size(before + text) - (_xz_size(before) if before else 0)


def _xz_size(text: bytes) -> int:
    return 8 * len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_XZ_FILTERS))


COMPRESSORS: Mapping[str, Callable[[bytes, bytes], int]] = {"gzip -9": gzip_bits, "xz -9e": xz_bits}
