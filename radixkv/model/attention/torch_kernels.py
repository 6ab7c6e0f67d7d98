"""The operations on the pool in PyTorch, for a CPU."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu import attention
from radixkv.kernels.cpu.attention_plan import AttentionSpec, plan_cpu_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.refused_attention import TORCH


class PlansOfStep:
    """The attention plans of a step: for each batch, by the properties of the layers that share a plan.

    A step has up to two batches: one for the block pool, and one for the parts of windowed layers, or for the rows of a
    shortened last layer. The plans of earlier steps are dropped.
    """

    def __init__(self) -> None:
        self._plans: deque[tuple[PagedBatch, dict[Any, Any]]] = deque(maxlen=2)

    def of(self, batch: PagedBatch) -> dict[Any, Any]:
        """Return the plans of a batch; empty for a new one."""
        for planned_batch, plans in self._plans:
            if planned_batch is batch:
                return plans
        self._plans.append((batch, {}))
        return self._plans[-1][1]


class TorchKernels:
    """Implements `AttentionKernels` with PyTorch's scatter and scaled dot-product attention, for models on a CPU.

    The attention of a step is planned once for all layers with the same requirements.
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
