"""The step of a model whose layers are in several pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.kernels.native.attention import Queries
from radixkv.kernels.native.layer import KVView
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.paged_step import PagedStep
from radixkv.storage.layer_groups import Place


class GroupedStep:
    """Passes each layer on to the step over its pool.

    Args:
        steps: the step over each pool.
        places: the pool of each layer, and its index there. A pool may have no layers.
    """

    def __init__(self, steps: Sequence[PagedStep], places: Sequence[Place]) -> None:
        self._steps = steps
        self._places = places
        self._used = [steps[pool] for pool in sorted({place.pool for place in places})]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        pool, own_layer = self._places[layer]
        return self._steps[pool].attend(own_layer, query, key, value, scoring)

    def view(self, layer: int, queries: Queries, num_kv_heads: int, scoring: Scoring) -> KVView | None:
        """See `ViewedStep.view`."""
        pool, own_layer = self._places[layer]
        return self._steps[pool].view(own_layer, queries, num_kv_heads, scoring)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See `PagedStep.write`."""
        pool, own_layer = self._places[layer]
        self._steps[pool].write(own_layer, key, value)

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See `PagedStep.read`."""
        pool, own_layer = self._places[layer]
        return self._steps[pool].read(own_layer, query, scoring)

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all K and V written so far are finite, bool `[num_tokens]`; see `PagedStep.is_finite`."""
        first, *others = (step.is_finite for step in self._used)
        for other in others:
            first = first & other
        return first
