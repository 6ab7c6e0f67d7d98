"""Inputs for kernels that only copy data: new K/V for the pool, and whole blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.parts.attention_inputs import Heads, worst_error
from bench.parts.device_time import num_input_sets
from bench.parts.kernel_row import Contestant
from radixkv.kernels import reference
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import is_quantized

# Relative error of a vector. It allows for elements that are rounded in the other direction: one step of int4 is a
# seventh of the largest element, 5 % of the norm.
_QUANTIZED_TOLERANCE = 0.1

_SLOT_BYTES = torch.int64.itemsize

WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, KVPool, int], None]
"""Writes keys and values into slots of a layer of a pool: `(keys, values, slots, pool, layer)`."""

CopyBlocks = Callable[[KVPool, torch.Tensor, torch.Tensor], None]
"""Copies blocks of a pool: `(pool, sources, targets)`."""


class TokenWrites:
    """K and V of new tokens for each layer of a pool, in blocks of random order.

    Attributes:
        num_bytes: bytes read and written by one step in one layer.
        tolerance: maximum error of a stored vector; 0 if it is not quantized.
    """

    def __init__(
        self, num_tokens: int, kv_dtype: torch.dtype, heads: Heads, cache_bytes: int, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        num_blocks = -(-num_tokens // heads.block_size)
        kv_shape = (num_tokens, heads.num_kv_heads, heads.head_dim)
        block_shape = (heads.num_kv_heads, heads.block_size, heads.head_dim)  # of one layer
        block_bytes = KVPool.allocate(1, 1, *block_shape, dtype=kv_dtype).blocks.numel()
        stored_bytes = num_tokens * block_bytes // heads.block_size
        read_bytes = 2 * num_tokens * heads.num_kv_heads * heads.head_dim * torch.bfloat16.itemsize
        self.num_bytes = stored_bytes + read_bytes + num_tokens * _SLOT_BYTES
        self.tolerance = _QUANTIZED_TOLERANCE if is_quantized(kv_dtype) else 0.0
        num_sets = num_input_sets(self.num_bytes, cache_bytes)
        self._pool = KVPool.allocate(num_blocks, num_sets, *block_shape, dtype=kv_dtype, device=device)
        self._pool.blocks.random_()
        self._tokens = torch.randn(num_sets, 2, *kv_shape, dtype=torch.bfloat16, device=device)
        slots = torch.randperm(num_blocks)[:, None] * heads.block_size + torch.arange(heads.block_size)
        self._slots = slots.flatten()[:num_tokens].to(device)

    def contestant(self, write: WriteKV) -> Contestant:
        """Return the calls of a kernel that writes tokens, one per layer."""
        calls = [
            partial(write, key, value, self._slots, self._pool, layer)
            for layer, (key, value) in enumerate(self._tokens)
        ]
        return Contestant([*calls], partial(self._compute_error, write))

    def _compute_error(self, write: WriteKV) -> float:
        """Return the largest error of a stored vector; infinite if the kernel changed anything else in the pool."""
        got, expected = _clone(self._pool), _clone(self._pool)
        key, value = self._tokens[0]
        write(key, value, self._slots, got, 0)
        reference.write_kv(key, value, self._slots, expected, 0)
        error = worst_error(self._read_tokens(got), self._read_tokens(expected))
        # With the reference's bytes in the written slots, only other slots can still differ.
        reference.write_kv(key, value, self._slots, got, 0)
        return error if torch.equal(got.blocks, expected.blocks) else float("inf")

    def _read_tokens(self, pool: KVPool) -> torch.Tensor:
        """Read the tokens of the first layer from a pool, `[2, num_tokens, num_kv_heads, head_dim]`."""
        index = (self._slots // pool.block_size, 0, slice(None), slice(None), self._slots % pool.block_size)
        scales = None if pool.scales is None else pool.scales[index].transpose(0, 1)
        return pool.to_numbers(pool.values[index].transpose(0, 1), scales)


class BlockCopies:
    """Pairs of blocks to copy in each step, in random order.

    Attributes:
        num_bytes: bytes read and written by one step.
    """

    def __init__(self, num_copies: int, num_layers: int, heads: Heads, cache_bytes: int, device: torch.device) -> None:
        torch.manual_seed(0)
        block_shape = (num_layers, heads.num_kv_heads, heads.block_size, heads.head_dim)
        block_bytes = KVPool.allocate(1, *block_shape, dtype=torch.bfloat16).blocks.numel()
        self.num_bytes = 2 * num_copies * block_bytes
        num_sets = num_input_sets(self.num_bytes, cache_bytes)
        num_blocks = 2 * num_copies * num_sets
        self._pool = KVPool.allocate(num_blocks, *block_shape, dtype=torch.bfloat16, device=device)
        self._pool.blocks.random_()
        self._pairs = torch.randperm(num_blocks).view(num_sets, 2, num_copies).to(device)

    def contestant(self, copy: CopyBlocks) -> Contestant:
        """Return the calls of a kernel that copies blocks, one per step."""
        calls = [partial(copy, self._pool, sources, targets) for sources, targets in self._pairs]
        return Contestant([*calls], partial(self._compute_error, copy))

    def _compute_error(self, copy: CopyBlocks) -> float:
        """Return 0 if the pool has the same bits as after the reference, else infinity."""
        got, expected = _clone(self._pool), _clone(self._pool)
        sources, targets = self._pairs[0]
        copy(got, sources, targets)
        reference.copy_blocks(expected, sources, targets)
        return 0.0 if torch.equal(got.blocks, expected.blocks) else float("inf")


def _clone(pool: KVPool) -> KVPool:
    """Return a copy of the pool."""
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = pool.values.shape
    cloned = KVPool.allocate(
        num_blocks, num_layers, num_kv_heads, block_size, pool.head_dim, dtype=pool.dtype, device=pool.blocks.device
    )
    cloned.blocks.copy_(pool.blocks)
    return cloned
