"""Buffers that are used again."""

from __future__ import annotations

import mmap


class BufferPool:
    """Buffers of one size, each at the start of a page.

    Both matter: new memory is filled with zeros first, and into memory that begins 16 bytes after a page, as an
    allocator gives it, an EPYC copies from the page cache at a quarter of the speed.

    Safe for threads: a list's append and pop are whole.

    Args:
        buffer_bytes: size of each.
        max_idle_bytes: bytes of buffers that are kept while nobody uses them.
    """

    def __init__(self, buffer_bytes: int, max_idle_bytes: int = 256 << 20) -> None:
        self._buffer_bytes = buffer_bytes
        self._max_idle = max_idle_bytes // buffer_bytes
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a buffer, whatever is in it."""
        try:
            return self._idle.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self._buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def give_back(self, buffer: memoryview) -> None:
        """Take a buffer back. Nobody may use it after this."""
        if len(self._idle) < self._max_idle:
            self._idle.append(buffer)
