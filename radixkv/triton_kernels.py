"""The operations on the pool as Triton kernels: what the service uses on a GPU."""

from __future__ import annotations

import torch

from radixkv.kernels import copy_blocks, paged_attention, write_kv
from radixkv.kernels.attention_plan import AttentionPlan, plan_attention
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool

# Keys of a split in exact mode. More splits fill the device when few tokens follow a long prefix, and cost more partial
# results when many do: of 2,048 new tokens after 8,192, as many bytes as 5 times their queries in float32.
_SPLIT_TOKENS = 2048


class TritonKernels:
    """Implements `AttentionKernels`. Plans the attention of a step once for each window, not once for each layer.

    Args:
        is_exact: whether tiles and splits are the same for every batch, so that a token's attention depends on its
            prefix alone; otherwise they fit the batch.
    """

    write_kv = staticmethod(write_kv.write_kv)
    copy_blocks = staticmethod(copy_blocks.copy_blocks)

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._batch: PagedBatch | None = None
        self._plans: dict[int | None, AttentionPlan] = {}  # of `_batch`, by window

    def paged_attention(
        self,
        query: torch.Tensor,
        pool: KVPool,
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
            self._plans[window] = plan_attention(
                batch,
                num_query_heads=query.shape[1],
                num_kv_heads=pool.num_kv_heads,
                dtype=query.dtype,
                window=window,
                tile_rows=_tile_rows(query.dtype) if self._is_exact else None,
                split_tokens=_SPLIT_TOKENS if self._is_exact else None,
            )
        return paged_attention.paged_attention(
            query, pool, layer, batch, self._plans[window], scale=scale, window=window, softcap=softcap
        )


def _tile_rows(dtype: torch.dtype) -> int:
    """Rows of a tile in exact mode: what suits long suffixes, since short ones wait for memory anyway."""
    return 16 if dtype == torch.float32 else 128
