"""The operations on the pool in C++, for a CPU with AVX2. Unsupported cases fall back to PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention import Attention, Queries, supports
from radixkv.kernels.native.attention_work import plan_work
from radixkv.kernels.native.layer import KVView
from radixkv.kernels.native.rows import NativeRows, has_adjacent_heads
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.refused_attention import NATIVE
from radixkv.model.attention.torch_kernels import PlansOfStep, TorchKernels


class NativeKernels:
    """Implements `AttentionKernels`. Quantized pools and unsupported strides fall back to PyTorch.

    The attention of a step is planned once for all layers with the same heads and window. Its results are the same in
    exact mode and in fast mode: those of a row depend only on its prefix.

    Args:
        library: the C++ kernels; see `load_library`.
    """

    name = NATIVE
    prefers_layer_major_pool = TorchKernels.prefers_layer_major_pool
    copy_blocks = staticmethod(TorchKernels.copy_blocks)
    hadamard_transform = staticmethod(TorchKernels.hadamard_transform)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._rows = NativeRows(library)
        self._torch = TorchKernels()
        self._plans = PlansOfStep()

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor,
        pool: KVPool,
        layer: int,
        max_magnitudes: torch.Tensor | None = None,
    ) -> None:
        """Compute `reference.write_kv`."""
        if supports(pool, key.dtype) and has_adjacent_heads(key) and (value is None or has_adjacent_heads(value)):
            self._rows.write_kv(key, value, slots, pool, layer, max_magnitudes)
        else:
            self._torch.write_kv(key, value, slots, pool, layer, max_magnitudes)

    def paged_attention(
        self, query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, scoring: Scoring
    ) -> torch.Tensor:
        """Compute `reference.paged_attention`; see `radixkv.kernels.native.attention`."""
        if query.stride(2) != 1 or not supports(pool, query.dtype):
            return self._torch.paged_attention(query, pool, layer, batch, scoring)
        attention = self._attention_of(batch, Queries.of(query), pool, scoring)
        return attention(query, layer, _sinks_of(scoring))

    def view(
        self,
        queries: Queries,
        num_kv_heads: int,
        pool: KVPool,
        layers: Sequence[int],
        batch: PagedBatch,
        scoring: Scoring,
        max_magnitudes: torch.Tensor,
    ) -> KVView | None:
        """Return the K/V of layers that are computed in one call; None if the kernels or the pool do not support them.

        Args:
            queries: the memory layout of the queries of each layer.
            num_kv_heads: KV heads of each layer.
            layers: indices of the layers in the pool.
            pool, batch, scoring: as for `paged_attention`.
            max_magnitudes: updated with the magnitudes of the new K and V; see `reference.write_kv`.
        """
        has_same_heads = (pool.num_kv_heads, pool.head_dim) == (num_kv_heads, queries.head_dim) and not pool.is_latent
        if not has_same_heads or not supports(pool, queries.dtype):
            return None
        attention = self._attention_of(batch, queries, pool, scoring)
        return KVView(attention, layers, _sinks_of(scoring), batch.slots, max_magnitudes)

    def _attention_of(self, batch: PagedBatch, queries: Queries, pool: KVPool, scoring: Scoring) -> Attention:
        """Return the attention of layers with the same pool, the same scoring and the same layout of queries.

        Layers with the same heads and window share an `AttentionWork`.
        """
        plans = self._plans.of(batch)
        key = (queries, pool.values.data_ptr(), scoring.scale, scoring.window, scoring.softcap)
        attention: Attention | None = plans.get(key)
        if attention is None:
            num_kv_heads = pool.num_kv_heads
            group_size = queries.num_heads // num_kv_heads
            work_key = (group_size, num_kv_heads, pool.head_dim, scoring.window)
            if work_key not in plans:
                plans[work_key] = plan_work(
                    batch,
                    group_size=group_size,
                    num_kv_heads=num_kv_heads,
                    head_dim=pool.head_dim,
                    window=scoring.window,
                    num_threads=torch.get_num_threads(),
                )
            attention = Attention(self._library, queries, pool, plans[work_key], scoring, torch.get_num_threads())
            plans[key] = attention
        return attention


def _sinks_of(scoring: Scoring) -> torch.Tensor | None:
    return None if scoring.sinks is None else scoring.sinks.float().contiguous()
