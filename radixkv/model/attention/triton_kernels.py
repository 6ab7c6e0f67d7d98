"""The operations on the pool as Triton kernels, for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu import attention, copy_blocks, hadamard, write_kv
from radixkv.kernels.gpu.attention_plan import AttentionPlan, fitting_tile_rows, plan_attention, tile_rows_for
from radixkv.kernels.gpu.attention_splits import HOPPER, DeviceRoom
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.gpu.dequantize_plan import DequantizePlan, plan_dequantize
from radixkv.kernels.gpu.hopper_attention import supports
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import is_quantized
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionUse, PlanKey
from radixkv.model.attention.refused_attention import DEQUANTIZED, POINTERS, SPECIALIZED, SPECIALIZED_DEQUANTIZED

# Keys of a split in exact mode. Shorter splits fill the device when few tokens follow a long prefix, but leave more
# partial results when many do: those of 2,048 new tokens after 8,192 have 5 times the bytes of their float32 queries.
_SPLIT_TOKENS = 2048


class TritonKernels:
    """Implements `AttentionKernels`. Plans the attention of a step once for all layers that share a plan.

    Args:
        is_exact: whether tiles and splits are the same for every batch, so that a token's attention depends on its
            prefix alone; otherwise they fit the batch.
        is_specialized: whether warps specialize where `supports` allows it. In exact mode that does not depend on the
            batch either.
        dequantizes_first: whether the blocks of a quantized pool are dequantized before attention rather than in it,
            see `kernels/gpu/dequantize_plan.py`; "always" is for trials. Always "never" in exact mode, since the choice
            depends on the batch.
        joins: whether rows of requests that share K/V are joined; off for comparisons.
        has_idle_work: whether plans get items that do nothing, like those of recorded steps; for trials.
        room: the device, whose programs share the work where splits fit the batch.

    Attributes:
        is_exact: whether tiles and splits are the same for every batch.
    """

    wants_pool_by_layer = False  # a block is copied as one region

    write_kv = staticmethod(write_kv.write_kv)
    copy_blocks = staticmethod(copy_blocks.copy_blocks)
    hadamard_transform = staticmethod(hadamard.hadamard_transform)

    def __init__(
        self,
        *,
        is_exact: bool,
        is_specialized: bool = False,
        dequantizes_first: Literal["never", "if it pays", "always"] = "never",
        joins: bool = True,
        has_idle_work: bool = False,
        room: DeviceRoom = HOPPER,
    ) -> None:
        assert not is_exact or dequantizes_first == "never"
        self.is_exact = is_exact
        self._is_specialized = is_specialized
        self._dequantizes_first = dequantizes_first
        self._joins = joins
        self._has_idle_work = has_idle_work
        self._room = room
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
        """Return the kernels that serve after a trial: no idle work, and dequantizing first only if it pays."""
        return TritonKernels(
            is_exact=self.is_exact,
            is_specialized=self._is_specialized,
            dequantizes_first="never" if self._dequantizes_first == "never" else "if it pays",
            room=self._room,
        )

    def ways(self) -> list[TritonKernels]:
        """Return kernels that serve, in every way in which they may attend: what is compiled differs."""
        if self._dequantizes_first != "if it pays":
            return [self]
        always = TritonKernels(
            is_exact=False, is_specialized=self._is_specialized, dequantizes_first="always", room=self._room
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
        """Compute `reference.paged_attention`. The first layer of those that share a plan makes it."""
        if batch is not self._batch:
            self.use_plans(batch, {})
        num_query_heads, window = key = PlanKey(query.shape[1], scoring.window)
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
        shape = (query.dtype, pool.dtype, pool.head_dim, pool.block_size, plan.tile_rows)
        return attention.paged_attention(
            query,
            pool,
            layer,
            batch,
            plan,
            scoring,
            is_specialized=self._is_specialized and supports(*shape),
        )

    def tile_rows(self, most_rows: int, dtype: torch.dtype) -> int:
        """Rows of the tiles for a batch whose longest request has `most_rows` packed rows."""
        if not self.is_exact:
            return fitting_tile_rows(most_rows, dtype)
        # What suits long suffixes, since short ones wait for memory anyway.
        return 16 if dtype == torch.float32 else 128

    def tile_rows_for(self, batch: PagedBatch, group_size: int, dtype: torch.dtype, window: int | None) -> int:
        """Rows of the tiles that suit a batch, also those of requests that share K/V."""
        if self.is_exact or not self._joins:
            return self.tile_rows(group_size * batch.most_query_tokens, dtype)
        return tile_rows_for(batch, group_size, dtype, window)

    def most_partials(self, num_requests: int, num_kv_heads: int, tile_rows: int) -> int:
        """Partial results of one KV head that a plan leaves at most where splits fit the batch."""
        return self._room.most_partials(num_requests, num_kv_heads, tile_rows)

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
        """Lay out the attention of all layers that share a plan; see `plan_attention`."""
        plan = plan_attention(
            batch,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            window=window,
            tile_rows=tile_rows,
            split_tokens=_SPLIT_TOKENS if self.is_exact else None,
            joins=self._joins,
            room=self._room,
        )
        return plan.with_idle_work() if self._has_idle_work else plan

    def use_plans(self, batch: PagedBatch, plans: Mapping[PlanKey, AttentionPlan]) -> None:
        """Attend for `batch` by these plans; a missing one is made when it is needed."""
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
    use: AttentionUse, capability: tuple[int, int], num_multiprocessors: int = 132
) -> dict[str, TritonKernels]:
    """List the kernels that are worth a trial on a GPU.

    Args:
        use: the demands of the model.
        capability: compute capability of the GPU, major and minor; (9, 0) is Hopper.
        num_multiprocessors: multiprocessors of the GPU.

    Returns:
        Kernels for a trial by the name of their attention, the fastest first. `for_service` of those that pass serves.
        The last ones need nothing special of the GPU or the shape.
    """
    kernels = {}
    dtype, shape, block_size, is_exact = use.dtype, use.shape, use.block_size, use.is_exact
    is_hopper = capability[0] == 9
    room = DeviceRoom(num_multiprocessors, shape.head_dim)
    if is_hopper and supports(dtype, shape.dtype, shape.head_dim, block_size):
        kernels[SPECIALIZED] = TritonKernels(is_exact=is_exact, is_specialized=True, has_idle_work=True, room=room)
    if not is_exact and is_quantized(shape.dtype) and dtype != torch.float32:
        if is_hopper and supports(dtype, dtype, shape.head_dim, block_size):
            kernels[SPECIALIZED_DEQUANTIZED] = TritonKernels(
                is_exact=False, is_specialized=True, dequantizes_first="always", has_idle_work=True, room=room
            )
        kernels[DEQUANTIZED] = TritonKernels(is_exact=False, dequantizes_first="always", has_idle_work=True, room=room)
    return kernels | {POINTERS: TritonKernels(is_exact=is_exact, has_idle_work=True, room=room)}
