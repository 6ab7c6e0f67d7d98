"""Moves whole blocks between the pool and host memory, as bytes, and parts of windowed layers behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import rotated_part
from radixkv.kernels.staging import to_device


def payload_layout(pool: KVPool, parts: KVPool | None = None) -> str:
    """Describe the numbers in a payload, for whatever outlives the process.

    Both orders of a pool make the same payload.

    Args:
        pool, parts: as for `BlockMover`.
    """
    if parts is not None:
        return f"{payload_layout(pool)}; then the same of {parts.num_layers} windowed layers, if they have it"
    vectors = "tokens" if pool.is_latent else "2, heads, tokens"
    layout = f"values [layers, {vectors}, dim], then scales [layers, {vectors}]"
    return f"{layout}; vectors rotated in parts of {rotated_part(pool.head_dim)}" if pool.is_rotated else layout


class BlockMover:
    """Copies blocks out of a pool and into it.

        payload   [ layers that store every token ... )[ windowed layers, if the block has its part ... )
                  0                            block_bytes                                 payload_bytes

    On a GPU copies come after the steps that were started before. The caller waits for those out of the pool alone.

    Args:
        pool: the K/V memory.
        parts: that of windowed layers; None if all layers are in `pool`.

    Attributes:
        block_bytes: bytes of one block without its part.
        payload_bytes: bytes of one block with its part.
    """

    def __init__(self, pool: KVPool, parts: KVPool | None = None) -> None:
        self._blocks = pool.blocks
        self._parts = None if parts is None else parts.blocks
        self.block_bytes = _bytes_of(pool.blocks)
        self.payload_bytes = self.block_bytes + (0 if parts is None else _bytes_of(parts.blocks))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that a payload may have."""
        return (self.payload_bytes,) if self._parts is None else (self.payload_bytes, self.block_bytes)

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> list[memoryview]:
        """Copy blocks to host memory. Returns their bytes, which nothing changes anymore.

        Args:
            block_ids: the blocks.
            part_ids: the part of each; None for one that has none, or for all.
        """
        if self._parts is None or part_ids is None:
            return [memoryview(each) for each in _copies(self._blocks, block_ids)]
        payloads = np.empty((len(block_ids), self.payload_bytes), np.uint8)
        payloads[:, : self.block_bytes] = _copies(self._blocks, block_ids)
        with_part = [index for index, part_id in enumerate(part_ids) if part_id is not None]
        if with_part:
            known = [part_id for part_id in part_ids if part_id is not None]
            payloads[with_part, self.block_bytes :] = _copies(self._parts, known)
        sizes = [self.block_bytes if part_id is None else self.payload_bytes for part_id in part_ids]
        return [each[:size].data for each, size in zip(payloads, sizes, strict=True)]

    def has_part(self, payload: memoryview) -> bool:
        """Whether a payload of `read` has the part of its block; all have it if all layers are in one pool."""
        return payload.nbytes == self.payload_bytes

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy bytes of `read` into blocks, whatever was there, but not into parts."""
        _fill(self._blocks, block_ids, [payload[: self.block_bytes] for payload in payloads])

    def write_parts(self, part_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy the parts of such bytes into parts, whatever was there."""
        assert self._parts is not None, "nobody has parts to write"
        _fill(self._parts, part_ids, [payload[self.block_bytes :] for payload in payloads])


def _bytes_of(blocks: torch.Tensor) -> int:
    return blocks.shape[1:].numel()


def _copies(blocks: torch.Tensor, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    copied = blocks.index_select(0, torch.tensor(ids, device=blocks.device)).cpu()
    copies: npt.NDArray[np.uint8] = copied.reshape(len(ids), _bytes_of(blocks)).numpy()
    return copies


def _fill(blocks: torch.Tensor, ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
    if not ids or not _bytes_of(blocks):  # no bytes where all layers are windowed
        return
    if blocks.device.type != "cpu":
        fill_at_once(blocks, ids, payloads)
        return
    for block_id, payload in zip(ids, payloads, strict=True):
        block = blocks[block_id]
        np.copyto(block.numpy(), np.frombuffer(payload, np.uint8).reshape(block.shape))


def fill_at_once(blocks: torch.Tensor, ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
    """Copy bytes into blocks as a GPU takes them: in one upload from pinned memory, for which the host does not wait.

    Steps that are launched afterwards read what came.

    Args:
        blocks: bytes `[num_blocks, ...]`.
        ids: the blocks to fill, different ones.
        payloads: contiguous bytes for each.
    """
    source = torch.from_numpy(np.stack([np.frombuffer(each, np.uint8) for each in payloads]))  # [num_ids, bytes]
    index = to_device(torch.tensor(ids), blocks.device)
    blocks.index_copy_(0, index, to_device(source, blocks.device).view(len(ids), *blocks.shape[1:]))
