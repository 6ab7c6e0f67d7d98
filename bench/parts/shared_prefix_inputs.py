"""Inputs for attention of requests that decode after a shared prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bench.parts.attention_inputs import Heads, worst_error
from bench.parts.device_time import num_input_sets
from bench.parts.kernel_row import Contestant
from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_splits import DeviceCapacity
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKernels
from radixkv.model.attention.triton_kernels import TritonKernels


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
