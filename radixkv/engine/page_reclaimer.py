"""Returns pages of free K/V memory to the operating system, where blocks and parts share one memory."""

from __future__ import annotations

import logging

import numpy as np

from radixkv.cache.block_pool import BlockPool, BlockState
from radixkv.cache.window_pool import NO_PART, WindowPool
from radixkv.engine.observer import Observer
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.pages import release_pages, use_small_pages

# Pages are returned when the memory exceeds its bound by this share, since returning them takes system calls for
# each layer and head.
_SLACK = 1 / 64

_log = logging.getLogger(__name__)


class PageReclaimer(Observer):
    """Keeps blocks and parts within the memory that they share: returns pages of free ones to the operating system.

    A part is the memory in which a block's K/V of the windowed layers are stored; see `WindowPool`. Address space is
    reserved for the maximum number of blocks and of parts, which together would exceed the memory. The operating system
    assigns a page when it is first written. When too many pages are assigned, those of free blocks and parts are
    returned:

        addresses    blocks  [ used | free ...........................)   parts  [ used | free ......)
        memory               [ used )                                            [ used )              together bounded

    This happens at the end of a step, when evicted blocks have been copied for the tiers, so that nothing in the memory
    of free blocks and parts is still needed.

    Args:
        storage: the pools, on a CPU.
        blocks: which blocks are used.
        parts: which parts are used.

    Attributes:
        num_bytes: bytes of blocks and parts whose pages are assigned, at the end of the last step.
    """

    def __init__(self, storage: KVStorage, blocks: BlockPool, parts: WindowPool) -> None:
        self._storage = storage
        self._blocks = blocks
        self._parts = parts
        self._touched_blocks = np.zeros(storage.num_blocks, dtype=np.bool_)
        self._touched_parts = np.zeros(storage.num_parts, dtype=np.bool_)
        self._max_bytes = int((1 + _SLACK) * storage.num_bytes)
        self.num_bytes = 0
        for pool in (*storage.pools, *storage.part_pools):
            use_small_pages(pool)

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Record which blocks and parts are used, and return the pages of the others if there are too many.

        Complexity: a pass over the states of the blocks; `release_pages` for each pool if there are too many.
        """
        used_blocks = np.frombuffer(self._blocks.states(), dtype=np.uint8) != BlockState.FREE
        used_parts = np.zeros_like(self._touched_parts)
        used_parts[self._parts.table[self._parts.table != NO_PART]] = True
        self._touched_blocks |= used_blocks
        self._touched_parts |= used_parts
        self._update_num_bytes()
        if self.num_bytes <= self._max_bytes:
            return
        were_returned = [release_pages(pool, ~used_blocks, self._touched_blocks) for pool in self._storage.pools]
        were_returned += [release_pages(pool, ~used_parts, self._touched_parts) for pool in self._storage.part_pools]
        if not all(were_returned):
            _log.warning("the operating system did not take back memory of the pool, which may grow beyond its size")
            self._max_bytes = 2**63  # return no pages from now on
        self._touched_blocks, self._touched_parts = used_blocks, used_parts
        self._update_num_bytes()

    def _update_num_bytes(self) -> None:
        storage = self._storage
        self.num_bytes = int(self._touched_blocks.sum()) * storage.block_bytes
        self.num_bytes += int(self._touched_parts.sum()) * storage.part_bytes
