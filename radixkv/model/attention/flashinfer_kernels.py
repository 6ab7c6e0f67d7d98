"""FlashInfer's attention over the block pool, in fast mode, for steps that do not run as CUDA graphs.

FlashInfer can read a layer of the pool as it is stored: pages of K and V by head. It does not support a scale per
vector, so it is not used for quantized pools. The Triton kernels are used in CUDA graphs, and for writes and copies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionUse, PlanKey
from radixkv.model.attention.refused_attention import FLASHINFER
from radixkv.model.attention.triton_kernels import TritonKernels

# Memory for partial results of splits; FlashInfer raises if a plan needs more. Its documentation recommends 128 MB.
_WORKSPACE_BYTES = 1 << 28

_HEAD_DIMS = (64, 128, 256)
_MIN_CAPABILITY, _HOPPER_MAJOR = (8, 0), 9  # compute capability


class _Kind(NamedTuple):
    """Layers that share a plan."""

    num_query_heads: int
    scoring: Scoring


class FlashInferKernels:
    """Implements `PlanningKernels`. A step is planned once for all layers with the same query heads and scoring.

    Args:
        triton: plans and computes the attention in CUDA graphs.
        backend: FlashInfer's implementation: "fa3" on a Hopper GPU, otherwise "fa2".
    """

    name = FLASHINFER
    is_exact = False
    prefers_layer_major_pool = False

    write_kv = staticmethod(TritonKernels.write_kv)
    copy_blocks = staticmethod(TritonKernels.copy_blocks)
    hadamard_transform = staticmethod(TritonKernels.hadamard_transform)

    def __init__(self, triton: TritonKernels, backend: str) -> None:
        self._triton = triton
        self._backend = backend
        self._graph_batch: PagedBatch | None = None  # the batch of `use_plans`, whose attention runs in a CUDA graph
        self._batch: PagedBatch | None = None  # the last batch for which FlashInfer computed attention
        self._planned: set[_Kind] = set()  # kinds of layers for which `_batch` is planned
        self._wrappers: dict[_Kind, Any] = {}
        self._workspace: torch.Tensor | None = None
        self.tile_rows = triton.tile_rows
        self.tile_rows_for = triton.tile_rows_for
        self.plan = triton.plan
        self.max_partials = triton.max_partials

    def for_service(self) -> FlashInferKernels:
        """Return the kernels that serve after a trial."""
        return self.with_triton_kernels(self._triton.for_service())

    def with_triton_kernels(self, triton: TritonKernels) -> FlashInferKernels:
        """Return a copy that uses other Triton kernels in CUDA graphs."""
        return FlashInferKernels(triton, self._backend)

    def variants(self) -> list[FlashInferKernels | TritonKernels]:
        """Return these kernels, and all variants of those in CUDA graphs."""
        return [self, *self._triton.variants()]

    def use_plans(self, batch: PagedBatch, plans: Mapping[PlanKey, AttentionPlan]) -> None:
        """Use these plans, and the Triton kernels, for the attention of `batch`."""
        self._graph_batch = batch
        self._triton.use_plans(batch, plans)

    def paged_attention(
        self, query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, scoring: Scoring
    ) -> torch.Tensor:
        """Compute `reference.paged_attention`. The first layer of each kind plans the attention of the batch.

        Raises:
            RuntimeError, ValueError: FlashInfer can't plan or compute it.
        """
        if batch is self._graph_batch:
            return self._triton.paged_attention(query, pool, layer, batch, scoring)
        if batch is not self._batch:
            self._batch = batch
            self._planned = set()
        kind = _Kind(query.shape[1], scoring)
        if kind not in self._planned:
            self._plan(kind, query, pool, batch)
            self._planned.add(kind)
        output = query.new_empty(query.shape)
        self._wrappers[kind].run(query, pool.values[:, layer], out=output)
        return output

    def _plan(self, kind: _Kind, query: torch.Tensor, pool: KVPool, batch: PagedBatch) -> None:
        """Pass the batch to FlashInfer in its format: numbers of tokens and lists of pages, on the host."""
        kv_lens = np.array(batch.kv_lens)
        num_pages = -(-kv_lens // batch.block_size)
        pages = np.concatenate([row[:count] for row, count in zip(batch.host_tables, num_pages, strict=True)])
        host_arrays = (
            np.array(batch.query_starts),
            np.concatenate(([0], np.cumsum(num_pages))),
            pages,
            (kv_lens - 1) % batch.block_size + 1,  # tokens in the last page of each request
        )
        if kind not in self._wrappers:
            self._wrappers[kind] = self._new_wrapper(query.device)
        window, softcap = kind.scoring.window, kind.scoring.softcap
        self._wrappers[kind].plan(
            *(torch.from_numpy(array.astype(np.int32)) for array in host_arrays),
            kind.num_query_heads,
            pool.num_kv_heads,
            pool.head_dim,
            batch.block_size,
            causal=True,
            sm_scale=kind.scoring.scale,
            window_left=-1 if window is None else window - 1,  # without the query's own token
            logits_soft_cap=softcap,
            q_data_type=query.dtype,
            kv_data_type=pool.dtype,
        )

    def _new_wrapper(self, device: torch.device) -> Any:
        """Create a wrapper for one plan. All wrappers share a workspace, since layers run one after the other."""
        import flashinfer  # an extra

        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=self._backend)


def flashinfer_kernels(
    use: AttentionUse, capability: tuple[int, int], triton: TritonKernels
) -> FlashInferKernels | None:
    """Return FlashInfer's kernels for a trial; None if it is not installed, or does not support the model or the GPU.

    Args:
        use: the requirements of the model.
        capability: compute capability of the GPU, major and minor.
        triton: the Triton kernels for CUDA graphs.
    """
    shape = use.shape
    is_supported = (
        not use.is_exact
        and capability >= _MIN_CAPABILITY
        and use.dtype in (torch.bfloat16, torch.float16)
        and shape.dtype == use.dtype
        and shape.head_dim in _HEAD_DIMS
        and not any(kind.has_sinks for kind in use.kinds)
    )
    if not is_supported or importlib.util.find_spec("flashinfer") is None:
        return None
    return FlashInferKernels(triton, "fa3" if capability[0] == _HOPPER_MAJOR else "fa2")
