"""The pool of K/V blocks, in one of two layouts.

    by block   [ block 0 ............................ )[ block 1 ............................ )[ ...
                 values of all layers )[ their scales      values of all layers )[ their scales

    by layer   [ K of layer 0, head 0: block 0 )[ block 1 )[ ...   )[ K of layer 0, head 1: block 0 )[ ...

In a pool of int4, keys have 8 bits, and the key and the value of a token are stored as one row, [ key )[ value ).

Ordered by block, a block is one contiguous region in every dtype, so it can be copied as bytes. Ordered by layer,
adjacent blocks are adjacent in each head, so attention on a CPU can read them in place.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

from radixkv.kernels.quantization import INT4, dequantize, is_quantized, key_dtype, stored_dim, stored_dtype

_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """K and V of `num_blocks` blocks. `values` and `scales` are views of `blocks`.

    >>> pool = KVPool.allocate(4, num_layers=2, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.int8)
    >>> pool.values.shape, pool.scales.shape
    (torch.Size([4, 2, 2, 8, 16, 128]), torch.Size([4, 2, 2, 8, 16]))

    Attributes:
        dtype: float32, bfloat16, float16, float8_e4m3fn, int8 or int4. A pool of int4 stores keys in int8 and values in
            int4.
        head_dim: dimension of a key, and of a value, of one head.
        blocks: uint8, the bytes of each block: by block a contiguous `[num_blocks, block_bytes]`, by layer a strided
            `[num_blocks, num_layers, 2, num_kv_heads, bytes]`.
        values: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; in dim 2, 0 is K and 1 is V. In a
            latent pool dim 2 has size 1: the same vector serves as key and as value. In a pool of int4 dim 2 has size
            1, too: a row is a key of `head_dim` bytes, and a value of `head_dim // 2` bytes.
        scales: float32 `[num_blocks, num_layers, 2, num_kv_heads, block_size]`, one per key and one per value; None if
            the dtype is not quantized. In a latent pool dim 2 has size 1.
        is_by_layer: whether the memory is ordered by layer.
        rotates_values: whether `reference.hadamard_transform` is applied to values before they are stored, as for int4.
            The callers of kernels apply it; attention kernels use stored values without transforming them.
    """

    dtype: torch.dtype
    head_dim: int
    blocks: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None
    is_by_layer: bool = False
    rotates_values: bool = False

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        is_zeroed: bool = True,
        is_by_layer: bool = False,
        is_latent: bool = False,
    ) -> KVPool:
        """Allocate blocks of zeros, or uninitialized blocks if `is_zeroed` is false.

        A quantized pool is ordered by block even if `is_by_layer` is true. On a CPU a page of zeros takes memory only
        after something is written to it. With `is_latent` one vector per head is stored, which is both key and value.

        Raises:
            MemoryError, RuntimeError: the device does not have enough memory.
            ValueError: a pool does not support the dtype, or it is int4 with an odd `head_dim` or for latents.
        """
        if is_latent and dtype == INT4:
            raise ValueError("dtype: expected another one for latents, which are keys and values at once, got int4")
        scales_shape = (num_layers, 1 if is_latent else 2, num_kv_heads, block_size)  # of one block
        if dtype == INT4:
            values_shape = (num_layers, 1, num_kv_heads, block_size, head_dim + stored_dim(head_dim, INT4))
        else:
            values_shape = (*scales_shape, head_dim)
        value_bytes = math.prod(values_shape) * stored_dtype(dtype).itemsize
        scale_bytes = math.prod(scales_shape) * _SCALE_BYTES if is_quantized(dtype) else 0
        block_bytes = value_bytes + scale_bytes
        if is_zeroed and torch.device(device).type == "cpu":
            memory = _map_zero_pages(num_blocks * block_bytes)
        else:
            fill = torch.zeros if is_zeroed else torch.empty
            memory = fill(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        if is_by_layer and not is_quantized(dtype):
            memory_shape = (*scales_shape[:-1], num_blocks, block_size * head_dim)
            blocks = memory.view(dtype).view(memory_shape).permute(3, 0, 1, 2, 4)  # the dimension of blocks first
            values = torch.unflatten(blocks, 4, (block_size, head_dim))
            return cls(dtype, head_dim, blocks.view(torch.uint8), values, None, is_by_layer=True)
        blocks = memory.view(num_blocks, block_bytes)
        values = blocks[:, :value_bytes].view(stored_dtype(dtype)).view(num_blocks, *values_shape)
        scales = blocks[:, value_bytes:].view(torch.float32).view(num_blocks, *scales_shape) if scale_bytes else None
        return cls(dtype, head_dim, blocks, values, scales, rotates_values=dtype == INT4)

    @property
    def num_layers(self) -> int:
        """Layers that store K and V."""
        return self.values.shape[1]

    @property
    def is_latent(self) -> bool:
        """Whether a stored vector is both key and value."""
        return (self.values if self.scales is None else self.scales).shape[2] == 1

    @property
    def keys(self) -> torch.Tensor:
        """The stored keys `[num_blocks, num_layers, num_kv_heads, block_size, head_dim]`, a view."""
        return self.values[:, :, 0, ..., : self.head_dim]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.values.shape[3]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.values.shape[4]

    @property
    def value_offset(self) -> int:
        """Elements of `values` from a key to the value of the same token and head.

        The pool must be ordered by block, and must not be latent.
        """
        if self.dtype == INT4:
            return self.head_dim
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_strides(self) -> tuple[int, int]:
        """Strides of blocks in values, and in scales (0 without scales), of a pool that is ordered by block.

        They are computed, because torch may report other strides for a pool of one block.
        """
        block_bytes = self.blocks.shape[-1]
        return block_bytes // self.values.element_size(), block_bytes // _SCALE_BYTES if self.scales is not None else 0

    def to_numbers(
        self, values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Convert stored vectors to numbers.

        Args:
            values: a part of the pool's values, with dim 2 as the first one: `[2, ..., head_dim]`, `[1, ..., head_dim]`
                in a latent pool, `[1, ..., head_dim + head_dim // 2]` in a pool of int4.
            scales: the same part of the scales.
            dtype: dtype of the result.

        Returns:
            `[2, ..., head_dim]`, in a latent pool `[1, ..., head_dim]`; `values` itself if there is nothing to convert.
        """
        if scales is None:
            return values.to(dtype)
        if self.dtype != INT4:
            return dequantize(values, scales, self.dtype, dtype)
        stored_keys, stored_values = values[0, ..., : self.head_dim], values[0, ..., self.head_dim :]
        keys = dequantize(stored_keys, scales[0], key_dtype(INT4), dtype)
        return torch.stack((keys, dequantize(stored_values, scales[1], INT4, dtype)))


def _map_zero_pages(num_bytes: int) -> torch.Tensor:
    """Map memory that the operating system zeroes when it is first used. Zeroing 1.6 GB at once takes 0.6 s."""
    try:
        pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes can't be mapped") from error
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
