"""The operations on the pool as Triton kernels, for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import attention, copy_blocks, hadamard, write_kv
from radixkv.kernels.gpu.attention_plan import AttentionPlan, fitting_tile_rows, plan_attention, tile_rows_for
from radixkv.kernels.gpu.attention_splits import HOPPER, DeviceCapacity
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.gpu.dequantize_plan import DequantizePlan, plan_dequantize
from radixkv.kernels.gpu.hopper_attention import supports
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import is_quantized
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionUse, PlanKey
from radixkv.model.attention.refused_attention import DEQUANTIZED, POINTERS, SPECIALIZED, SPECIALIZED_DEQUANTIZED

# Keys per split in exact mode. Shorter splits use more of the device if few tokens follow a long prefix. If many tokens
# follow it, shorter splits produce more partial results: for 2,048 new tokens after 8,192, those of 2,048 keys are 5
# times as large as the queries in float32.
_SPLIT_TOKENS = 2048


class TritonKernels:
    """Implements `AttentionKernels`. Plans the attention of a step once for all layers that share a plan.

    Args:
        is_exact: whether tiles and splits are the same for every batch, so that a token's attention depends on its
            prefix alone; otherwise they fit the batch.
        is_specialized: whether warp specialization is used where `supports` allows it, which in exact mode does not
            depend on the batch either.
        dequantizes_first: whether the blocks of a quantized pool are dequantized before attention instead of within it,
            see `kernels/gpu/dequantize_plan.py`; "always" is for trials. It is "never" in exact mode, since the choice
            depends on the batch.
        joins: whether rows of requests that share K/V are joined; False for comparisons.
        has_idle_work: whether plans get work items without keys, like those of CUDA graphs; for trials.
        capacity: how many programs the device runs at once; used if splits are chosen for the batch.

    Attributes:
        is_exact: whether tiles and splits are the same for every batch.
    """

    prefers_layer_major_pool = False  # a block is copied as one region

    write_kv = staticmethod(write_kv.write_kv)
    copy_blocks = staticmethod(copy_blocks.copy_blocks)
    hadamard_transform = staticmethod(hadamard.hadamard_transform)

    def __init__(
        self,
        *,
        is_exact: bool,
        is_specialized: bool = False,
        dequantizes_first: Literal["never", "if faster", "always"] = "never",
        joins: bool = True,
        has_idle_work: bool = False,
        capacity: DeviceCapacity = HOPPER,
    ) -> None:
        assert not is_exact or dequantizes_first == "never"
        self.is_exact = is_exact
        self._is_specialized = is_specialized
        self._dequantizes_first = dequantizes_first
        self._joins = joins
        self._has_idle_work = has_idle_work
        self._capacity = capacity
        self._batch: PagedBatch | None = None
        self._plans: dict[PlanKey, AttentionPlan] = {}  # of `_batch`
        self._dequantize_plans: dict[PlanKey, DequantizePlan | None] = {}  # of `_batch`

    @property
    def name(self) -> str:
        """See `AttentionKernels.name`."""
        if self._dequantizes_first == "never":
            return SPECIALIZED if self._is_specialized else POINTERS
        return SPECIALIZED_DEQUANTIZED if self._is_specialized else DEQUANTIZED

    def for_service(self) -> TritonKernels:
        """Return the kernels that serve after a trial: without idle work, and dequantizing first only if faster."""
        return TritonKernels(
            is_exact=self.is_exact,
            is_specialized=self._is_specialized,
            dequantizes_first="never" if self._dequantizes_first == "never" else "if faster",
            capacity=self._capacity,
        )

    def variants(self) -> list[TritonKernels]:
        """Return all variants of the kernels that serve, each of which is compiled separately."""
        if self._dequantizes_first != "if faster":
            return [self]
        always = TritonKernels(
            is_exact=False, is_specialized=self._is_specialized, dequantizes_first="always", capacity=self._capacity
        )
        return [self, always]

    def paged_attention(
        self,
        query: torch.Tensor,
        pool: KVPool,
        layer: int,
        batch: PagedBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Compute `reference.paged_attention`. The plan is made in the first of the layers that share it."""
        if batch is not self._batch:
            self.use_plans(batch, {})
        num_query_heads, window = query.shape[1], scoring.window
        key = PlanKey(num_query_heads, window)
        if key not in self._plans:
            tile_rows = self.tile_rows_for(batch, num_query_heads // pool.num_kv_heads, query.dtype, window)
            self._plans[key] = self.plan(
                batch, num_query_heads, pool.num_kv_heads, query.dtype, window=window, tile_rows=tile_rows
            )
            self._dequantize_plans[key] = self._plan_dequantize(query, pool, batch, window)
        plan, dequantize_plan = self._plans[key], self._dequantize_plans.get(key)
        if dequantize_plan is not None:
            pool = dequantize_blocks(pool, layer, dequantize_plan.block_ids, query.dtype)
            layer, batch = 0, dequantize_plan.batch
        return attention.paged_attention(
            query,
            pool,
            layer,
            batch,
            plan,
            scoring,
            is_specialized=self._is_specialized
            and supports(query.dtype, pool.dtype, pool.head_dim, pool.block_size, plan.tile_rows),
        )

    def tile_rows(self, max_rows: int, dtype: torch.dtype) -> int:
        """Return the rows per tile if the longest request has `max_rows` rows: tokens times query heads per KV head."""
        if not self.is_exact:
            return fitting_tile_rows(max_rows, dtype)
        # Chosen for long suffixes, since attention of short ones is bound by memory anyway.
        return 16 if dtype == torch.float32 else 128

    def tile_rows_for(self, batch: PagedBatch, group_size: int, dtype: torch.dtype, window: int | None) -> int:
        """Return the best number of rows of the tiles for a batch, including rows of requests that share K/V."""
        if self.is_exact or not self._joins:
            return self.tile_rows(group_size * batch.max_query_len, dtype)
        return tile_rows_for(batch, group_size, dtype, window)

    def max_partials(self, num_requests: int, num_kv_heads: int, tile_rows: int) -> int:
        """Return the maximum number of partial results of a KV head in a plan whose splits are chosen for the batch."""
        return self._capacity.max_partials(num_requests, num_kv_heads, tile_rows)

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
        """Plan the attention of all layers that share a plan; see `plan_attention`."""
        plan = plan_attention(
            batch,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            window=window,
            tile_rows=tile_rows,
            split_tokens=_SPLIT_TOKENS if self.is_exact else None,
            joins=self._joins,
            capacity=self._capacity,
        )
        return plan.with_idle_work() if self._has_idle_work else plan

    def use_plans(self, batch: PagedBatch, plans: Mapping[PlanKey, AttentionPlan]) -> None:
        """Use these plans for the attention of `batch`. A missing plan is made when it is needed."""
        self._batch = batch
        self._plans = dict(plans)
        self._dequantize_plans = {}

    def _plan_dequantize(
        self, query: torch.Tensor, pool: KVPool, batch: PagedBatch, window: int | None
    ) -> DequantizePlan | None:
        if self._dequantizes_first == "never":
            return None
        return plan_dequantize(
            batch,
            pool,
            num_query_heads=query.shape[1],
            dtype=query.dtype,
            window=window,
            is_forced=self._dequantizes_first == "always",
        )


def candidates(
    use: AttentionUse, capability: tuple[int, int], num_multiprocessors: int = HOPPER.num_multiprocessors
) -> dict[str, TritonKernels]:
    """List the kernels that are worth a trial on a GPU.

    Args:
        use: the requirements of the model.
        capability: compute capability of the GPU, major and minor; (9, 0) is Hopper.
        num_multiprocessors: multiprocessors of the GPU.

    Returns:
        Kernels for a trial by the name of their attention, the fastest first; see `for_service` for those that pass.
        The last ones run on any GPU and with any shape.
    """
    kernels = {}
    dtype, shape, block_size, is_exact = use.dtype, use.shape, use.block_size, use.is_exact
    is_hopper = capability[0] == 9
    capacity = DeviceCapacity(num_multiprocessors, shape.head_dim)
    if is_hopper and supports(dtype, shape.dtype, shape.head_dim, block_size):
        kernels[SPECIALIZED] = TritonKernels(
            is_exact=is_exact, is_specialized=True, has_idle_work=True, capacity=capacity
        )
    if not is_exact and is_quantized(shape.dtype) and dtype != torch.float32:
        if is_hopper and supports(dtype, dtype, shape.head_dim, block_size):
            kernels[SPECIALIZED_DEQUANTIZED] = TritonKernels(
                is_exact=False, is_specialized=True, dequantizes_first="always", has_idle_work=True, capacity=capacity
            )
        kernels[DEQUANTIZED] = TritonKernels(
            is_exact=False, dequantizes_first="always", has_idle_work=True, capacity=capacity
        )
    return kernels | {POINTERS: TritonKernels(is_exact=is_exact, has_idle_work=True, capacity=capacity)}
