"""Returns the memory of free blocks to the operating system."""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap

import numpy as np
import numpy.typing as npt

from radixkv.kernels.kv_pool import KVPool

_log = logging.getLogger(__name__)


def release_pages(pool: KVPool, is_free: npt.NDArray[np.bool_], is_touched: npt.NDArray[np.bool_]) -> bool:
    """Return the pages of free blocks of a pool on a CPU to the operating system. They are zeroed at their next use.

    A page that also contains a part of a block in use is kept.

    Args:
        pool: the pool.
        is_free: bool `[num_blocks]`, whether each block is free.
        is_touched: bool `[num_blocks]`, whether each block may have pages.

    Returns:
        Whether the operating system accepted the pages. If not, they stay allocated, which does no harm.

    Complexity: a system call for each run of adjacent free blocks with a touched one; in a pool ordered by layer, for
        each such run in each layer, K or V, and head.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_free, [False])).astype(np.int8)))
    num_touched = np.concatenate(([0], np.cumsum(is_touched & is_free)))
    runs = [(int(first), int(end)) for first, end in edges.reshape(-1, 2) if num_touched[end] > num_touched[first]]
    blocks, page_bytes = pool.blocks, mmap.PAGESIZE  # `blocks` has elements of one byte, so its strides are in bytes
    block_stride, *region_strides, _ = blocks.stride()
    # In a pool ordered by layer, each index (layer, K or V, head) is a region that holds a part of every block. In a
    # pool ordered by block there is one region, with the empty index.
    for region in itertools.product(*map(range, blocks.shape[1:-1])):
        offset = sum(index * stride for index, stride in zip(region, region_strides, strict=True))
        base = blocks.data_ptr() + offset
        for first, end in runs:
            start = -(-(base + first * block_stride) // page_bytes) * page_bytes
            size = (base + end * block_stride) // page_bytes * page_bytes - start
            if size > 0 and not _advise(start, size, mmap.MADV_DONTNEED):
                return False
    return True


def use_small_pages(pool: KVPool) -> None:
    """Prevent transparent huge pages in a pool on a CPU, since `release_pages` could not release them."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):  # an operating system without transparent huge pages, such as macOS
        return
    memory = pool.blocks.untyped_storage()
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        _advise(start, size, mmap.MADV_NOHUGEPAGE)


def _advise(start: int, size: int, advice: int) -> bool:
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0:
        return True
    _log.debug("madvise(%d) of %d bytes failed: errno %d", advice, size, ctypes.get_errno())
    return False
