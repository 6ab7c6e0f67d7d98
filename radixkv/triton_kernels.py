"""The operations on the pool as Triton kernels: what the service uses on a GPU."""

from __future__ import annotations

import torch

from radixkv.kernels import copy_blocks, paged_attention, write_kv
from radixkv.kernels.attention_plan import AttentionPlan, plan_attention
from radixkv.kernels.batch import PagedBatch


class TritonKernels:
    """Implements `AttentionKernels`. Plans the attention of a step once for each window, not once for each layer."""

    write_kv = staticmethod(write_kv.write_kv)
    copy_blocks = staticmethod(copy_blocks.copy_blocks)

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._plans: dict[int | None, AttentionPlan] = {}  # of `_batch`, by window

    def paged_attention(
        self,
        query: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend over prefix and suffix; see `kernels/reference.py`."""
        if batch is not self._batch:
            self._batch, self._plans = batch, {}
        if window not in self._plans:
            self._plans[window] = plan_attention(batch, pool, num_query_heads=query.shape[1], window=window)
        return paged_attention.paged_attention(
            query, pool, layer, batch, self._plans[window], scale=scale, window=window, softcap=softcap
        )
