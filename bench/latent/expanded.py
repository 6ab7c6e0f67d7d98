"""The comparison: the same model, with K and V of every head in the pool."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionStep


class ExpandedStep:
    """Passes heads whose values are shorter than their keys to a step that wants equal lengths.

    Args:
        step: stores zeros behind the values, too.
    """

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        assert value is not None, "every head has its own"
        value_dim = value.shape[-1]
        filled = pad(value, (0, key.shape[-1] - value_dim))
        return self._step.attend(layer, query, key, filled, scoring)[..., :value_dim]
