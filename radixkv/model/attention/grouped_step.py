"""The step of a model whose windowed layers have a pool of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.paged_step import PagedStep
from radixkv.storage.layer_groups import Place


class GroupedStep:
    """Passes each layer on to the step over its pool.

    Args:
        steps: the step over each pool, by whether its layers are windowed. A pool without layers has none.
        places: the pool of each layer, and its index there.
    """

    def __init__(self, steps: Mapping[bool, PagedStep], places: Sequence[Place]) -> None:
        self._steps = steps
        self._places = places

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        is_windowed, own_layer = self._places[layer]
        return self._steps[is_windowed].attend(own_layer, query, key, value, scoring)

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all K and V written so far are finite, bool `[num_tokens]`; see `PagedStep.is_finite`."""
        first, *others = (step.is_finite for step in self._steps.values())
        for other in others:
            first = first & other
        return first
