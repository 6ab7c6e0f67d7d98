"""The comparison: the same model, with K and V of every head in the pool."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from radixkv.model.attention.interface import AttentionCall, AttentionStep


class ExpandedStep:
    """Passes heads whose values are shorter than their keys to a step that wants equal lengths.

    Args:
        step: stores zeros behind the values, too.
    """

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        layer, query, key, value, scoring = call
        assert value is not None, "every head has its own"
        value_dim = value.shape[-1]
        filled = pad(value, (0, key.shape[-1] - value_dim))
        return self._step.attend(AttentionCall(layer, query, key, filled, scoring))[..., :value_dim]
