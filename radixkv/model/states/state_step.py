"""The states of one forward pass: read before the first row of each request, kept when the pass is over."""

from __future__ import annotations

import torch

from radixkv.model.states.state_rows import StateRows
from radixkv.storage.state_pool import StatePool


class StateStep:
    """Computes the short convolutions of one forward pass.

    A row's sum has one order, the oldest input first, and its numbers are multiplied and added one by one in float32.
    So its bits depend on its own inputs alone, whatever is computed with it.

    States are written by `keep`, all at once after the pass. A pass that raises leaves them as they were, and can be
    computed again.

    Args:
        pool: the states.
        rows: the rows of this pass.
    """

    def __init__(self, pool: StatePool, rows: StateRows) -> None:
        self._pool = pool
        self._rows = rows
        self._left: dict[int, torch.Tensor] = {}  # by layer: `[num_writes, num_inputs, num_channels]`
        self._is_finite: torch.Tensor | None = None

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve the rows of a layer, each with the inputs before it in its own sequence.

        Args:
            layer: index among the layers that keep a state.
            rows: `[num_rows, num_channels]`.
            weight: `[num_channels, num_inputs + 1]`, the oldest input first.
            bias: `[num_channels]`, or None.

        Returns:
            `[num_rows, num_channels]`, in the dtype of `rows`.
        """
        is_finite = rows.isfinite().all(dim=-1)
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        kept = self._pool.states[self._rows.sources, layer]  # [num_requests, num_inputs, num_channels]
        joined = torch.cat((kept.flatten(0, 1), rows))
        self._left[layer] = joined[self._rows.left]
        return convolve([joined[inputs] for inputs in self._rows.inputs], weight, bias)

    def keep(self) -> None:
        """Write the states that the pass leaves. All layers have convolved."""
        if self._rows.targets.numel():
            layers = [self._left[layer] for layer in range(self._pool.shape.num_layers)]
            self._pool.states[self._rows.targets] = torch.stack(layers, 1)

    @property
    def is_finite(self) -> torch.Tensor | None:
        """Whether the inputs of each row are finite, bool `[num_rows]`; None if no layer has convolved."""
        return self._is_finite


def convolve(inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add up inputs times weights in float32, the oldest input first and the bias last.

    Args:
        inputs: the inputs of each row, the oldest first, each `[num_rows, num_channels]`.
        weight: `[num_channels, len(inputs)]`.
        bias: `[num_channels]`, or None.

    Returns:
        `[num_rows, num_channels]`, in the dtype of the inputs.
    """
    total = inputs[0].float() * weight[:, 0].float()
    for index, each in enumerate(inputs[1:], 1):
        total = total + each.float() * weight[:, index].float()
    if bias is not None:
        total = total + bias.float()
    return total.to(inputs[0].dtype)
