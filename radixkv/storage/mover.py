"""Moves whole blocks between the pool and host memory, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import rotated_part


def payload_layout(pool: KVPool) -> str:
    """Describe the numbers in a payload, for whatever outlives the process.

    Both orders of a pool make the same payload.
    """
    vectors = "tokens" if pool.is_latent else "2, heads, tokens"
    layout = f"values [layers, {vectors}, dim], then scales [layers, {vectors}]"
    return f"{layout}; vectors rotated in parts of {rotated_part(pool.head_dim)}" if pool.is_rotated else layout


class BlockMover:
    """Copies blocks out of a pool and into it.

    On a GPU a copy comes after the steps that were started before, and the caller waits for it.

    Args:
        pool: the K/V memory.

    Attributes:
        payload_bytes: bytes of one block.
    """

    def __init__(self, pool: KVPool) -> None:
        self._blocks = pool.blocks
        self._shape = pool.blocks.shape[1:]
        self.payload_bytes = self._shape.numel()

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Copy blocks to host memory. Returns their bytes, which nothing changes anymore."""
        ids = torch.tensor(block_ids, device=self._blocks.device)
        copies = self._blocks.index_select(0, ids).cpu().reshape(len(block_ids), self.payload_bytes).numpy()
        return [memoryview(each) for each in copies]

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy bytes of `read` into blocks, whatever was there."""
        for block_id, payload in zip(block_ids, payloads, strict=True):
            source = np.frombuffer(payload, np.uint8).reshape(self._shape)
            if self._blocks.device.type == "cpu":
                np.copyto(self._blocks[block_id].numpy(), source)
            else:
                self._blocks[block_id].copy_(torch.tensor(source))
