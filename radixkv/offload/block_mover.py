"""Copies whole blocks, with their parts of windowed layers, between the pool and host memory, as bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.copies import CompleteCopy, Copy, ReadBlocks
from radixkv.offload.gpu_copies import GpuCopies


class BlockMover:
    """Copies blocks out of the pools and into them.

        payload   [ layers that store every token ... )[ windowed layers, if the block has its part ... )
                  0                            block_bytes                                 payload_bytes

    On a CPU, copies are complete when a method returns. On a GPU a method only launches them, one for each block and
    pool, on a stream of their own:

        read    pool[block] ──▶ pinned slot ── event ──▶ threads of the stores copy the slot, or write it
        write   pinned slot of the host tier, or of `stage` ──▶ pool[block] ── event ──▶ the slot is released

    Args:
        pools: the memory of blocks, a pool for each K/V shape. A payload contains the bytes of a block in the first
            pool, then those in the next one, and so on.
        part_pools: the same for windowed layers; empty if all layers store every token.
        native: copy functions in C++, which fill many blocks on a CPU faster; None to use PyTorch.
        gpu: copies blocks of pools on a GPU; None for pools on a CPU.

    Attributes:
        block_bytes: bytes of one block without its part.
        payload_bytes: bytes of one block with its part.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        part_pools: Sequence[KVPool] = (),
        native: NativeCopies | None = None,
        gpu: GpuCopies | None = None,
    ) -> None:
        self._native = native
        self._gpu = gpu
        self._blocks = [pool.blocks for pool in pools]
        self._parts = [pool.blocks for pool in part_pools]
        self.block_bytes, self.payload_bytes = payload_sizes(pools, part_pools)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that a payload may have."""
        return (self.payload_bytes, self.block_bytes) if self._parts else (self.payload_bytes,)

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> ReadBlocks:
        """Copy blocks to host memory.

        Args:
            block_ids: the blocks.
            part_ids: the part of each block, None for a block without a part; None if no block has a part.

        Raises:
            MemoryError: there are too few staging slots, or too little host memory. Nothing was copied.
        """
        if self._gpu is not None:
            return self._read_from_gpu(self._gpu, block_ids, part_ids or [None] * len(block_ids))
        start_s = time.perf_counter()
        payloads = self._read(block_ids, part_ids)
        return ReadBlocks(payloads, CompleteCopy(time.perf_counter() - start_s))

    def has_part(self, payload: memoryview) -> bool:
        """Whether a payload of `read` has the part of its block; true if all layers store every token."""
        return payload.nbytes == self.payload_bytes

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Copy payloads from `read` into blocks, overwriting them, without the parts.

        Args:
            block_ids: the blocks to fill, different ones.
            payloads: contiguous bytes for each. They must not change before the copy is complete.
        """
        return self._fill(self._blocks, block_ids, [payload[: self.block_bytes] for payload in payloads])

    def write_parts(self, part_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Copy the parts in payloads from `read` into parts of windowed layers, overwriting them; see `write`."""
        assert self._parts, "there are no windowed layers"
        return self._fill(self._parts, part_ids, [payload[self.block_bytes :] for payload in payloads])

    def stage(self, payload: memoryview) -> memoryview | None:
        """Copy a payload into pinned memory, so that `write` only launches its copy. Any thread may call this.

        Returns:
            The copy; None if the pools are on a CPU, so that no copy is needed, or if no slot is free.
        """
        slot = None if self._gpu is None else self._gpu.slots.take()
        if slot is None:
            return None
        np.copyto(slot[: payload.nbytes], np.frombuffer(payload, np.uint8))
        return slot[: payload.nbytes].data

    def _read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None) -> list[memoryview]:
        if not self._parts or part_ids is None:
            return [each.data for each in _copy_blocks(self._blocks, block_ids)]
        payloads = np.empty((len(block_ids), self.payload_bytes), np.uint8)
        payloads[:, : self.block_bytes] = _copy_blocks(self._blocks, block_ids)
        indexes_with_part = [index for index, part_id in enumerate(part_ids) if part_id is not None]
        if indexes_with_part:
            present_ids = [part_id for part_id in part_ids if part_id is not None]
            payloads[indexes_with_part, self.block_bytes :] = _copy_blocks(self._parts, present_ids)
        sizes = [self.block_bytes if part_id is None else self.payload_bytes for part_id in part_ids]
        return [each[:size].data for each, size in zip(payloads, sizes, strict=True)]

    def _read_from_gpu(self, gpu: GpuCopies, block_ids: Sequence[int], part_ids: Sequence[int | None]) -> ReadBlocks:
        gpu.stream.release_complete()
        slots = []
        for _ in block_ids:
            slot = gpu.slots.take()
            if slot is None:
                raise MemoryError(f"no staging slots for {len(block_ids)} blocks")
            slots.append(slot)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        payloads = []
        for slot, block_id, part_id in zip(slots, block_ids, part_ids, strict=True):
            target = torch.from_numpy(slot)
            has_part = part_id is not None or not self._parts
            pairs += zip(_split(target, self._blocks), _blocks_at(self._blocks, block_id), strict=True)
            if part_id is not None:
                parts = _split(target[self.block_bytes :], self._parts)
                pairs += zip(parts, _blocks_at(self._parts, part_id), strict=True)
            payloads.append(slot[: self.payload_bytes if has_part else self.block_bytes].data)
        return ReadBlocks(payloads, gpu.stream.copy(pairs, slots))

    def _fill(self, pools: Sequence[torch.Tensor], ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Copy payloads into blocks: the bytes of the first pool, then those of the next one, and so on."""
        if self._gpu is not None:
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for block_id, payload in zip(ids, payloads, strict=True):
                pairs += zip(_blocks_at(pools, block_id), _split(_tensor_of(payload), pools), strict=True)
            return self._gpu.stream.copy(pairs, list(payloads))
        start_s = time.perf_counter()
        start = 0
        for blocks in pools:
            end = start + _block_bytes_of(blocks)
            self._fill_pool(blocks, ids, [payload[start:end] for payload in payloads])
            start = end
        return CompleteCopy(time.perf_counter() - start_s)

    def _fill_pool(self, blocks: torch.Tensor, ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        if not ids or not _block_bytes_of(blocks):  # a block has no bytes if all layers are windowed
            return
        memory = blocks.numpy()
        if self._native is not None and self._native.fill(memory, ids, payloads):
            return
        for block_id, payload in zip(ids, payloads, strict=True):
            block = memory[block_id]
            np.copyto(block, np.frombuffer(payload, np.uint8).reshape(block.shape))


def payload_sizes(pools: Sequence[KVPool], part_pools: Sequence[KVPool] = ()) -> tuple[int, int]:
    """Return the bytes of a payload without its part and with it; see `BlockMover`."""
    block_bytes = sum(_block_bytes_of(pool.blocks) for pool in pools)
    return block_bytes, block_bytes + sum(_block_bytes_of(pool.blocks) for pool in part_pools)


def _block_bytes_of(blocks: torch.Tensor) -> int:
    """Return the bytes of one block of a pool."""
    return blocks.shape[1:].numel()


def _blocks_at(pools: Sequence[torch.Tensor], block_id: int) -> Iterator[torch.Tensor]:
    """Return the bytes of one block in each pool that has any, as views of the pools."""
    return (blocks[block_id].view(-1) for blocks in pools if _block_bytes_of(blocks))


def _split(payload: torch.Tensor, pools: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Divide the bytes of a payload among the pools that have any."""
    start = 0
    for size in filter(None, map(_block_bytes_of, pools)):
        yield payload[start : start + size]
        start += size


def _tensor_of(payload: memoryview) -> torch.Tensor:
    """Return a view of a payload, which may be read-only: PyTorch only takes writable memory without a warning."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=torch.uint8)


def _copy_blocks(pools: Sequence[torch.Tensor], ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    copies = [_gather(blocks, ids).reshape(len(ids), _block_bytes_of(blocks)) for blocks in pools]
    return copies[0] if len(copies) == 1 else np.concatenate(copies, axis=1)


def _gather(blocks: torch.Tensor, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    gathered: npt.NDArray[np.uint8] = blocks.numpy()[ids]  # takes 0.6 of the time that `index_select` takes
    return gathered
