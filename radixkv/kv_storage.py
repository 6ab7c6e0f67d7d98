"""The tensor that block ids point into."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of one token in one model: `num_layers * 2 * num_kv_heads * head_dim` numbers of `dtype`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVStorage:
    """Physical KV blocks: one block-major tensor, so that a block is one contiguous region.

    Attributes:
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, zeroed; dim 2: 0 is K, 1 is V.
        block_bytes: bytes of one block, all layers.

    Raises:
        ConfigError: the device has not that much memory.
    """

    def __init__(self, num_blocks: int, block_size: int, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_size * shape.token_bytes
        size = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            self.pool = torch.zeros(size, dtype=shape.dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"cache.capacity_tokens: {num_blocks * block_size} tokens need {num_blocks * self.block_bytes} bytes "
                f"of K/V on {device}, which can't be allocated"
            ) from error
