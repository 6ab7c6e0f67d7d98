"""The operations on the pool in C++, for a CPU with AVX2. Unsupported cases fall back to PyTorch."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention import Attention, Queries, supports
from radixkv.kernels.native.attention_work import AttentionWork, plan_work
from radixkv.kernels.native.layer import KVView
from radixkv.kernels.native.rows import NativeRows, has_adjacent_heads
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.refused_attention import NATIVE
from radixkv.model.attention.torch_kernels import MAX_BATCHES, TorchKernels


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
        self._planned_batches: deque[_PlannedBatch] = deque(maxlen=MAX_BATCHES)

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
        attention = self._planned_batch_of(batch).attention_of(Queries.of(query), pool, scoring)
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

    def _planned_batch_of(self, batch: PagedBatch) -> _PlannedBatch:
        planned_batch = next((each for each in self._planned_batches if each.batch is batch), None)
        if planned_batch is None:
            planned_batch = _PlannedBatch(self._library, batch)
            self._planned_batches.append(planned_batch)
        return planned_batch


def _sinks_of(scoring: Scoring) -> torch.Tensor | None:
    return None if scoring.sinks is None else scoring.sinks.float().contiguous()


class _PlannedBatch:
    """The plans of one batch.

    Layers with the same heads and window share an `AttentionWork`. Layers that also have the same pool, the same
    scoring and the same memory layout of queries share an `Attention`.
    """

    def __init__(self, library: ctypes.CDLL, batch: PagedBatch) -> None:
        self.batch = batch
        self._library = library
        self._works: dict[tuple[int, int, int, int | None], AttentionWork] = {}
        self._attentions: dict[tuple[Any, ...], Attention] = {}

    def attention_of(self, queries: Queries, pool: KVPool, scoring: Scoring) -> Attention:
        key = (queries, pool.values.data_ptr(), scoring.scale, scoring.window, scoring.softcap)
        attention = self._attentions.get(key)
        if attention is None:
            group_size = queries.num_heads // pool.num_kv_heads
            work = self._work_of(group_size, pool.num_kv_heads, pool.head_dim, scoring.window)
            attention = Attention(self._library, queries, pool, work, scoring, torch.get_num_threads())
            self._attentions[key] = attention
        return attention

    def _work_of(self, group_size: int, num_kv_heads: int, head_dim: int, window: int | None) -> AttentionWork:
        key = (group_size, num_kv_heads, head_dim, window)
        if key not in self._works:
            self._works[key] = plan_work(
                self.batch,
                group_size=group_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                window=window,
                num_threads=torch.get_num_threads(),
            )
        return self._works[key]
