"""The interfaces between a model's attention layers, a step, and the attention kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.storage.device_pool import KVShape


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention in a step.

    Attributes:
        layer: index of the layer among those with K and V.
        query: `[num_tokens, num_query_heads, head_dim]`, after the rotary embedding.
        key, value: `[num_tokens, num_kv_heads, head_dim]` of the same tokens. The value is None if the key is also the
            value.
        scoring: how scores are computed, and which keys a query sees.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    scoring: Scoring


class AttentionStep(Protocol):
    """Computes the attention of all layers in one forward pass.

    Steps of models with short convolutions also have a method `convolve`, and steps over a pool that decoder layers in
    C++ may write and read directly have a method `view`; see `PagedStep`.
    """

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store K and V of the new tokens, and attend from their queries.

        Returns:
            `[num_tokens, num_query_heads, head_dim]`.
        """
        ...


class QueryWatcher(Protocol):
    """Observes the queries of one request."""

    def see(self, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        """Observe the queries of one layer. K and V of their tokens are in the pool.

        Args:
            layer: index of the layer in the pool.
            query: `[num_tokens, num_query_heads, head_dim]`, after the rotary embedding.
            scoring: how scores are computed.
        """
        ...


class WatchedRows(NamedTuple):
    """The rows `[start, end)` of a batch, and the observer of their queries."""

    start: int
    end: int
    watcher: QueryWatcher


class AttentionKernels(Protocol):
    """Operations on the pool. `kernels/reference.py` defines what each computes, and documents its arguments."""

    @property
    def name(self) -> str:
        """The name of the kernels in the log, in metrics and in RADIXKV_REFUSED_ATTENTION."""
        ...

    @property
    def prefers_layer_major_pool(self) -> bool:
        """Whether the kernels read a layer-major pool faster; otherwise the pool is block-major."""
        ...

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slots: torch.Tensor,
        pool: KVPool,
        layer: int,
        max_magnitudes: torch.Tensor | None = None,
    ) -> None:
        """Write K and V of new tokens into their slots, and update `max_magnitudes`."""
        ...

    def hadamard_transform(self, vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Apply the Hadamard transform, for a pool with `rotates_values`; see `reference.hadamard_transform`."""
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        pool: KVPool,
        layer: int,
        batch: PagedBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend from each request's suffix over its prefix and the suffix itself."""
        ...

    def copy_blocks(self, pool: KVPool, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks."""
        ...


class PlanKey(NamedTuple):
    """The layers that share a plan: those with the same number of query heads and the same window."""

    num_query_heads: int
    window: int | None


class PlanningKernels(AttentionKernels, Protocol):
    """Kernels whose attention is planned on the host, so that a step can be captured and replayed with another plan."""

    @property
    def is_exact(self) -> bool:
        """Whether tiles and splits are the same for every batch."""
        ...

    def variants(self) -> Sequence[PlanningKernels]:
        """Return all variants of these kernels, each of which is compiled separately."""
        ...

    def tile_rows(self, max_rows: int, dtype: torch.dtype) -> int:
        """Return the number of rows of the tiles for a batch.

        Args:
            max_rows: packed rows of its longest request: tokens times query heads per KV head.
            dtype: dtype of the queries.
        """
        ...

    def tile_rows_for(self, batch: PagedBatch, group_size: int, dtype: torch.dtype, window: int | None) -> int:
        """Return the best number of rows of the tiles for a batch, at least `tile_rows` of its longest request.

        Args:
            batch: the token rows of a step, on the host.
            group_size: query heads per KV head.
            dtype: dtype of the queries.
            window: the sliding window of the layers.
        """
        ...

    def max_partials(self, num_requests: int, num_kv_heads: int, tile_rows: int) -> int:
        """Return the maximum number of partial results of a KV head in a plan whose splits are chosen for the batch.

        Args:
            num_requests: requests of the batch.
            num_kv_heads: KV heads of the pool.
            tile_rows: rows of a tile.
        """
        ...

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
        ...

    def use_plans(self, batch: PagedBatch, plans: Mapping[PlanKey, AttentionPlan]) -> None:
        """Use these plans for the attention of `batch`. A missing plan is made when it is needed."""
        ...


class AttentionKind(NamedTuple):
    """Query heads of a layer, the window and softcap of its `Scoring`, and whether it has sinks."""

    num_query_heads: int
    window: int | None
    softcap: float | None
    has_sinks: bool = False

    @property
    def plan_key(self) -> PlanKey:
        """The key of the plan that serves such layers."""
        return PlanKey(self.num_query_heads, self.window)


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """What one model requires of attention kernels.

    Attributes:
        kinds: kinds of its layers, each once.
        dtype: dtype of the queries.
        shape: shape and format of K and V in the pool.
        block_size: tokens per block.
        device: device on which the kernels run.
        is_exact: whether a row's bits must not depend on the rows that are computed with it.
    """

    kinds: tuple[AttentionKind, ...]
    dtype: torch.dtype
    shape: KVShape
    block_size: int
    device: torch.device
    is_exact: bool
