"""Moves whole blocks between the pool and host memory, as bytes, and parts of windowed layers behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.copies import NativeCopies
from radixkv.kernels.quantization import rotated_part
from radixkv.kernels.staging import to_device, to_device_beside_steps

_COPIED_BYTES = 256 << 20


def payload_layout(pools: Sequence[KVPool], part_pools: Sequence[KVPool] = ()) -> str:
    """Describe the numbers in a payload, for whatever outlives the process.

    Both orders of a pool make the same payload.

    Args:
        pools, part_pools: as for `BlockMover`.
    """
    layout = "; then ".join(_layout_of(pool, is_only=len(pools) == 1) for pool in pools)
    if part_pools:
        parts = payload_layout(part_pools)
        told = "the same" if parts == layout else parts
        num_windowed = sum(pool.num_layers for pool in part_pools)
        return f"{layout}; then {told} of {num_windowed} windowed layers, if they have it"
    return layout


def _layout_of(pool: KVPool, *, is_only: bool) -> str:
    vectors = "tokens" if pool.is_latent else "2, heads, tokens"
    layout = f"values [layers, {vectors}, dim], then scales [layers, {vectors}]"
    if not is_only:
        layout += f" of {pool.num_layers} layers of {pool.num_kv_heads} heads of {pool.head_dim}"
    return f"{layout}; vectors rotated in parts of {rotated_part(pool.head_dim)}" if pool.is_rotated else layout


class BlockMover:
    """Copies blocks out of the pools and into them.

        payload   [ layers that store every token ... )[ windowed layers, if the block has its part ... )
                  0                            block_bytes                                 payload_bytes

    On a GPU copies come after the steps that were started before. The caller waits for those out of a pool alone.

    Args:
        pools: the memory of blocks, a pool for each K/V shape; their bytes follow each other.
        part_pools: the same of windowed layers; empty if all layers store every token.
        native: copies in C++, which fill many blocks on a CPU faster; None for none.

    Attributes:
        block_bytes: bytes of one block without its part.
        payload_bytes: bytes of one block with its part.
    """

    def __init__(
        self, pools: Sequence[KVPool], part_pools: Sequence[KVPool] = (), native: NativeCopies | None = None
    ) -> None:
        self._native = native
        self._blocks = [pool.blocks for pool in pools]
        self._parts = [pool.blocks for pool in part_pools]
        self.block_bytes = sum(map(_bytes_of, self._blocks))
        self.payload_bytes = self.block_bytes + sum(map(_bytes_of, self._parts))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that a payload may have."""
        return (self.payload_bytes, self.block_bytes) if self._parts else (self.payload_bytes,)

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> list[memoryview]:
        """Copy blocks to host memory. Returns their bytes, which nothing changes anymore.

        Args:
            block_ids: the blocks.
            part_ids: the part of each; None for one that has none, or for all.
        """
        if not self._parts or part_ids is None:
            return [each.data for each in _copies(self._blocks, block_ids)]
        payloads = np.empty((len(block_ids), self.payload_bytes), np.uint8)
        payloads[:, : self.block_bytes] = _copies(self._blocks, block_ids)
        with_part = [index for index, part_id in enumerate(part_ids) if part_id is not None]
        if with_part:
            known = [part_id for part_id in part_ids if part_id is not None]
            payloads[with_part, self.block_bytes :] = _copies(self._parts, known)
        sizes = [self.block_bytes if part_id is None else self.payload_bytes for part_id in part_ids]
        return [each[:size].data for each, size in zip(payloads, sizes, strict=True)]

    def has_part(self, payload: memoryview) -> bool:
        """Whether a payload of `read` has the part of its block; all have it if all layers store every token."""
        return payload.nbytes == self.payload_bytes

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy bytes of `read` into blocks, whatever was there, but not into parts."""
        self._fill(self._blocks, block_ids, [payload[: self.block_bytes] for payload in payloads])

    def write_parts(self, part_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy the parts of such bytes into parts, whatever was there."""
        assert self._parts, "nobody has parts to write"
        self._fill(self._parts, part_ids, [payload[self.block_bytes :] for payload in payloads])

    def _fill(self, pools: Sequence[torch.Tensor], ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy bytes into blocks of the pools: those of the first pool, then those of the next one."""
        start = 0
        for blocks in pools:
            end = start + _bytes_of(blocks)
            self._fill_one(blocks, ids, [payload[start:end] for payload in payloads])
            start = end

    def _fill_one(self, blocks: torch.Tensor, ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        if not ids or not _bytes_of(blocks):  # no bytes where all layers are windowed
            return
        if blocks.device.type != "cpu":
            fill_at_once(blocks, ids, payloads)
            return
        memory = blocks.numpy()
        if self._native is not None and self._native.fill(memory, ids, payloads):
            return
        for block_id, payload in zip(ids, payloads, strict=True):
            block = memory[block_id]
            np.copyto(block, np.frombuffer(payload, np.uint8).reshape(block.shape))


def _bytes_of(blocks: torch.Tensor) -> int:
    return blocks.shape[1:].numel()


def _copies(pools: Sequence[torch.Tensor], ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    copies = [_gathered(blocks, ids).reshape(len(ids), _bytes_of(blocks)) for blocks in pools]
    return copies[0] if len(copies) == 1 else np.concatenate(copies, axis=1)


def _gathered(blocks: torch.Tensor, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    if blocks.device.type == "cpu":
        gathered: npt.NDArray[np.uint8] = blocks.numpy()[ids]  # takes 0.6 of the time that `index_select` takes
        return gathered
    index = torch.tensor(ids, device=blocks.device)
    pieces = [blocks.index_select(0, index[some]).cpu().numpy() for some in _slices(blocks, len(ids))]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _slices(blocks: torch.Tensor, num_blocks: int) -> list[slice]:
    """Cut what a GPU copies into what it copies at a time: that takes as much memory again beside the pool."""
    num_at_once = max(1, _COPIED_BYTES // max(1, _bytes_of(blocks)))
    return [slice(start, start + num_at_once) for start in range(0, num_blocks, num_at_once)]


def fill_at_once(blocks: torch.Tensor, ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
    """Copy bytes into blocks as a GPU takes them: uploads from pinned memory, for which neither host nor steps wait.

    Steps that are launched afterwards read what came. Uploads have a stream of their own; within the device, blocks are
    filled between two steps.

    Args:
        blocks: bytes `[num_blocks, ...]`.
        ids: the blocks to fill, different ones.
        payloads: contiguous bytes for each.
    """
    for some in _slices(blocks, len(ids)):
        source = torch.from_numpy(np.stack([np.frombuffer(each, np.uint8) for each in payloads[some]]))  # [ids, bytes]
        index = to_device(torch.tensor(ids[some]), blocks.device)
        blocks.index_copy_(0, index, to_device_beside_steps(source, blocks.device).view(-1, *blocks.shape[1:]))
