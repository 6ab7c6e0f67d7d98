"""Buffers that are used again."""

from __future__ import annotations

import itertools
import mmap


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
