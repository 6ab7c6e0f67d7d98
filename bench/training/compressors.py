"""Sizes of texts compressed by gzip and xz, with and without another text that the decompressor already knows."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Mapping

_GZIP_WINDOW = 32_768  # bytes; the maximum distance of a match in gzip
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]  # its window holds 64 MB


def gzip_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits of a text compressed by deflate at the highest level, without headers.

    Args:
        text: the text to compress.
        before: a text that the compressor and the decompressor know; its last 32 KiB are the dictionary.
    """
    dictionary = before[-_GZIP_WINDOW:]
    compressor = zlib.compressobj(9, wbits=-15, zdict=dictionary) if dictionary else zlib.compressobj(9, wbits=-15)
    return 8 * len(compressor.compress(text) + compressor.flush())


def xz_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits that a text adds to a text compressed before it, by LZMA2 at the highest level, without headers.

    Args:
        text: the text to compress.
        before: a text of up to 64 MB that compressor and decompressor know.
    """
    return _compressed_xz_bits(before + text) - (_compressed_xz_bits(before) if before else 0)


def _compressed_xz_bits(text: bytes) -> int:
    return 8 * len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_XZ_FILTERS))


COMPRESSORS: Mapping[str, Callable[[bytes, bytes], int]] = {"gzip -9": gzip_bits, "xz -9e": xz_bits}
