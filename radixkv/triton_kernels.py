"""The operations on the pool as Triton kernels: what the service uses on a GPU."""

from __future__ import annotations

import torch

from radixkv.kernels import copy_blocks, paged_attention, write_kv
from radixkv.kernels.attention_plan import AttentionPlan, fitting_tile_rows, plan_attention
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.specialized_attention import supports
from radixkv.kv_storage import KVShape

# Keys of a split in exact mode. More splits fill the device when few tokens follow a long prefix, and cost more partial
# results when many do: of 2,048 new tokens after 8,192, as many bytes as 5 times their queries in float32.
_SPLIT_TOKENS = 2048


class TritonKernels:
    """Implements `AttentionKernels`. Plans the attention of a step once for each window, not once for each layer.

    Args:
        is_exact: whether tiles and splits are the same for every batch, so that a token's attention depends on its
            prefix alone; otherwise they fit the batch.
        is_specialized: whether warps specialize where `supports` says that they can, which in exact mode does not
            depend on the batch either.
    """

    write_kv = staticmethod(write_kv.write_kv)
    copy_blocks = staticmethod(copy_blocks.copy_blocks)

    def __init__(self, *, is_exact: bool, is_specialized: bool = False) -> None:
        self._is_exact = is_exact
        self._is_specialized = is_specialized
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
            self.use_plans(batch, {})
        if window not in self._plans:
            tile_rows = self.tile_rows(query.shape[1] // pool.num_kv_heads * batch.most_query_tokens, query.dtype)
            self._plans[window] = self.plan(
                batch, query.shape[1], pool.num_kv_heads, query.dtype, window=window, tile_rows=tile_rows
            )
        plan = self._plans[window]
        shape = (query.dtype, pool.dtype, pool.head_dim, pool.block_size, plan.tile_rows)
        return paged_attention.paged_attention(
            query,
            pool,
            layer,
            batch,
            plan,
            scale=scale,
            window=window,
            softcap=softcap,
            is_specialized=self._is_specialized and supports(*shape),
        )

    def tile_rows(self, most_rows: int, dtype: torch.dtype) -> int:
        """Rows of the tiles for a batch whose longest request has so many packed rows."""
        if not self._is_exact:
            return fitting_tile_rows(most_rows, dtype)
        # What suits long suffixes, since short ones wait for memory anyway.
        return 16 if dtype == torch.float32 else 128

    def plan(
        self,
        batch: PagedBatch,
        num_query_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        *,
        window: int | None,
        tile_rows: int,
    ) -> AttentionPlan:
        """Lay out the attention of all layers with one window; see `plan_attention`."""
        return plan_attention(
            batch,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            window=window,
            tile_rows=tile_rows,
            split_tokens=_SPLIT_TOKENS if self._is_exact else None,
        )

    def use_plans(self, batch: PagedBatch, plans: dict[int | None, AttentionPlan]) -> None:
        """Attend for a batch by these plans, by window; what is missing is planned."""
        self._batch, self._plans = batch, plans


def candidates(
    dtype: torch.dtype, shape: KVShape, block_size: int, capability: tuple[int, int], *, is_exact: bool
) -> dict[str, TritonKernels]:
    """Choose what is worth a trial on a GPU.

    Args:
        dtype: of the queries.
        shape: K and V as the pool stores them.
        block_size: tokens a block.
        capability: of the GPU, major and minor; (9, 0) is Hopper.
        is_exact: see `TritonKernels`.

    Returns:
        Kernels by the name of their attention, the fastest first. The last ones need nothing of the GPU or the shape.
    """
    kernels = {}
    if capability[0] == 9 and supports(dtype, shape.dtype, shape.head_dim, block_size):
        kernels["warp-specialized attention"] = TritonKernels(is_exact=is_exact, is_specialized=True)
    return kernels | {"attention through pointers": TritonKernels(is_exact=is_exact)}
