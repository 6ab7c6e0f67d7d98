"""Inputs of the kernels that `bench.kernels` measures: copies, rows, and attention after a shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from bench.parts.attention_inputs import Heads, worst_error
from bench.parts.device_time import num_input_sets
from bench.parts.kernel_row import Contestant
from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_splits import DeviceCapacity
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.norm_style import LLAMA, NormStyle
from radixkv.kernels.quantization import is_quantized
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKernels
from radixkv.model.attention.triton_kernels import TritonKernels

# Relative error of a vector. It allows for elements that are rounded in the other direction: one step of int4 is a
# seventh of the largest element, 5 % of the norm.
_QUANTIZED_TOLERANCE = 0.1

_SLOT_BYTES = torch.int64.itemsize

WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, KVPool, int], None]
"""Writes keys and values into slots of a layer of a pool: `(keys, values, slots, pool, layer)`."""

CopyBlocks = Callable[[KVPool, torch.Tensor, torch.Tensor], None]
"""Copies blocks of a pool: `(pool, sources, targets)`."""

_EPS = 1e-5

AddRMSNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, NormStyle], tuple[torch.Tensor, torch.Tensor]]
"""Adds a residual to rows: `(rows, residual, weight, eps, style)`. Returns the sums, and the normalized sums."""

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SwiGLU = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


class NormedRows:
    """Hidden states and residuals in bfloat16, and the weight of an RMS norm as in Llama.

    Attributes:
        num_bytes: bytes read and written by one call: two tensors in, two out.
    """

    def __init__(self, num_tokens: int, hidden_size: int, cache_bytes: int, device: torch.device) -> None:
        self._pairs = _draw_pairs(num_tokens, hidden_size, 4, cache_bytes, device)
        self.num_bytes = 4 * self._pairs[0, 0].nbytes
        self._weight = torch.randn(hidden_size, dtype=torch.bfloat16, device=device)

    def contestant(self, add_rms_norm: AddRMSNorm) -> Contestant:
        """Return the calls of a kernel that adds the residual and computes the norm, one per set of inputs."""
        calls = [partial(add_rms_norm, rows, residual, self._weight, _EPS, LLAMA) for rows, residual in self._pairs]
        rows, residual = self._pairs[0]
        expected = torch.stack(reference.add_rms_norm(rows, residual, self._weight, _EPS, LLAMA))
        return Contestant([*calls], lambda: worst_error(torch.stack(calls[0]()), expected))


class GatedRows:
    """Gates and the activations that they multiply, in bfloat16.

    Attributes:
        num_bytes: bytes read and written by one call: two tensors in, one out.
    """

    def __init__(self, num_tokens: int, intermediate_size: int, cache_bytes: int, device: torch.device) -> None:
        self._pairs = _draw_pairs(num_tokens, intermediate_size, 3, cache_bytes, device)
        self.num_bytes = 3 * self._pairs[0, 0].nbytes

    def contestant(self, swiglu: SwiGLU) -> Contestant:
        """Return the calls of a SwiGLU kernel, one per set of inputs."""
        calls = [partial(swiglu, gate, up) for gate, up in self._pairs]
        expected = reference.swiglu(*self._pairs[0])
        return Contestant([*calls], lambda: worst_error(calls[0](), expected))


class LinearRows:
    """Hidden states and the weights of linear layers in bfloat16.

    Attributes:
        flops: FLOPs of one call.
        num_bytes: bytes read and written by one call.
    """

    def __init__(
        self, num_tokens: int, in_features: int, out_features: int, cache_bytes: int, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.flops = 2.0 * num_tokens * in_features * out_features
        num_values = num_tokens * (in_features + out_features) + in_features * out_features
        self.num_bytes = num_values * torch.bfloat16.itemsize
        num_sets = num_input_sets(self.num_bytes, cache_bytes)
        self._rows = torch.randn(num_sets, num_tokens, in_features, dtype=torch.bfloat16, device=device)
        self._weights = torch.randn(num_sets, out_features, in_features, dtype=torch.bfloat16, device=device)

    def contestant(self, linear: Linear) -> Contestant:
        """Return the calls of a linear layer, one per set of inputs."""
        calls = [partial(linear, rows, weight) for rows, weight in zip(self._rows, self._weights, strict=True)]
        expected = functional.linear(self._rows[0].float(), self._weights[0].float())
        return Contestant([*calls], lambda: worst_error(calls[0](), expected))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests that compute one token each, after a shared prefix and one block of their own.

    Attributes:
        num_requests: number of requests.
        prefix_tokens: tokens of the prefix, whole blocks.
        is_exact: the attention is planned as in exact mode.
        is_specialized: the warp-specialized kernel is used if it supports the case.
    """

    num_requests: int
    prefix_tokens: int
    is_exact: bool = False
    is_specialized: bool = False

    def __str__(self) -> str:
        specialized = ", specialized" if self.is_specialized else ""
        exact = ", exact" if self.is_exact else ""
        return f"{self.num_requests} decode after {self.prefix_tokens} shared{specialized}{exact}"

    def modes(self, may_specialize: bool) -> list[SharedPrefix]:
        """List the same requests in fast mode, in exact mode, and in exact mode with specialized warps if possible."""
        exact = replace(self, is_exact=True)
        modes = [self, exact]
        if may_specialize:
            modes.append(replace(exact, is_specialized=True))
        return modes

    def kernels(self, capacity: DeviceCapacity, *, joins: bool) -> TritonKernels:
        """Return the kernels for a device; `joins`: whether they join the rows of requests that share K/V."""
        return TritonKernels(is_exact=self.is_exact, is_specialized=self.is_specialized, joins=joins, capacity=capacity)


class SharedDecodes:
    """Input sets of one case, in bfloat16: queries, and K/V whose shared part is in the pool once.

    Attributes:
        flops: FLOPs of both matmuls, of all requests.
        num_bytes: bytes of queries and outputs, and of all K/V once.
    """

    def __init__(
        self, case: SharedPrefix, heads: Heads, cache_bytes: int, device: torch.device, num_layers: int
    ) -> None:
        torch.manual_seed(0)
        num_shared_blocks = case.prefix_tokens // heads.block_size
        num_blocks = num_shared_blocks + case.num_requests
        block_shape = (heads.num_kv_heads, heads.block_size, heads.head_dim)
        kv_bytes = num_blocks * KVPool.allocate(1, 1, *block_shape, dtype=torch.bfloat16).blocks.shape[1]
        num_sets = num_input_sets(kv_bytes, cache_bytes)
        num_pool_layers = max(num_sets, num_layers)
        self._pool = KVPool.allocate(num_blocks, num_pool_layers, *block_shape, dtype=torch.bfloat16, device=device)
        self._pool.values[:, :num_sets].normal_()
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        tables = [np.append(order[:num_shared_blocks], own_block) for own_block in order[num_shared_blocks:]]
        kv_lens = case.num_requests * [case.prefix_tokens + heads.block_size]
        self._batch = PagedBatch.build(case.num_requests * [1], kv_lens, tables, heads.block_size, device)
        query_shape = (case.num_requests, heads.num_query_heads, heads.head_dim)
        self._queries = [torch.randn(query_shape, dtype=torch.bfloat16, device=device) for _ in range(num_sets)]
        self._scoring = Scoring(heads.head_dim**-0.5)
        self.flops = 4.0 * heads.num_query_heads * heads.head_dim * sum(kv_lens)
        self.num_bytes = kv_bytes + 2 * self._queries[0].numel() * self._queries[0].element_size()

    def contestant(self, kernels: AttentionKernels) -> Contestant:
        """Return the calls of attention kernels, one per layer."""
        calls = [
            partial(kernels.paged_attention, query, self._pool, layer, self._batch, self._scoring)
            for layer, query in enumerate(self._queries)
        ]
        expected = reference.paged_attention(self._queries[0], self._pool, 0, self._batch, self._scoring)
        return Contestant([*calls], lambda: worst_error(calls[0](), expected))


def _clone(pool: KVPool) -> KVPool:
    """Return a copy of the pool."""
    num_blocks, num_layers, _, num_kv_heads, block_size, _ = pool.values.shape
    cloned = KVPool.allocate(
        num_blocks, num_layers, num_kv_heads, block_size, pool.head_dim, dtype=pool.dtype, device=pool.blocks.device
    )
    cloned.blocks.copy_(pool.blocks)
    return cloned


def _draw_pairs(
    num_tokens: int, num_columns: int, num_tensors: int, cache_bytes: int, device: torch.device
) -> torch.Tensor:
    """Return random numbers, `[num_sets, 2, num_tokens, num_columns]`.

    Args:
        num_tokens, num_columns: shape of each tensor.
        num_tensors: number of tensors of this shape that one call reads or writes.
        cache_bytes: size of the cache.
        device: device of the result.
    """
    torch.manual_seed(0)
    num_bytes = num_tensors * num_tokens * num_columns * torch.bfloat16.itemsize
    num_sets = num_input_sets(num_bytes, cache_bytes)
    return torch.randn(num_sets, 2, num_tokens, num_columns, dtype=torch.bfloat16, device=device)
