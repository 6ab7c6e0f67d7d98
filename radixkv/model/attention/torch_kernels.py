"""The operations on the pool in PyTorch, for a CPU."""

from __future__ import annotations

from collections import deque

import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu import attention
from radixkv.kernels.cpu.attention_plan import AttentionSpec, plan_cpu_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.refused_attention import TORCH

MAX_BATCHES = 2  # per step: one for the block pool, one for the parts of windowed layers


class TorchKernels:
    """Implements `AttentionKernels` with PyTorch's scatter and scaled dot-product attention, for models on a CPU.

    The attention of a step is planned once for all layers with the same requirements. A step has a batch for each pool.
    """

    name = TORCH
    prefers_layer_major_pool = True  # adjacent blocks are read in place

    write_kv = staticmethod(reference.write_kv)
    copy_blocks = staticmethod(reference.copy_blocks)
    hadamard_transform = staticmethod(reference.hadamard_transform)

    def __init__(self) -> None:
        self._plans = PlansOfStep()

    def paged_attention(
        self, query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, scoring: Scoring
    ) -> torch.Tensor:
        """Compute `reference.paged_attention`; see `radixkv.kernels.cpu.attention`."""
        plans = self._plans.of(batch)
        spec = AttentionSpec.of(query, pool, scoring)
        if spec not in plans:
            plans[spec] = plan_cpu_attention(batch, spec)
        return attention.paged_attention(query, pool, layer, plans[spec], scoring)
