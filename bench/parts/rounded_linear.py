"""An 8-bit linear layer with exact results on any processor, even one whose int8 instructions saturate."""

from __future__ import annotations

import torch

from radixkv.kernels.cpu.int8_linear import quantize_rows


class RoundedLinear(torch.nn.Module):
    """A linear layer as `model.weights = "int8"` makes it: weights and rows are rounded to integers.

    The integers are multiplied in float64, in which their sums are exact in any order.

    Args:
        linear: the layer, in float32.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        integers, scales = quantize_rows(linear.weight.detach())
        self._integers = integers.t().double()
        self._scales = scales[:, 0]
        self._bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows `[..., in_features]`. Returns `[..., out_features]`."""
        integers, scales = quantize_rows(rows.reshape(-1, rows.shape[-1]))
        product = (integers.double() @ self._integers).float().mul_(self._scales).mul_(scales)
        if self._bias is not None:
            product.add_(self._bias)
        return product.view(*rows.shape[:-1], -1)


def round_linears(module: torch.nn.Module) -> None:
    """Replace each linear layer by a rounded one. Embeddings are unchanged, even if they share a layer's weight."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, RoundedLinear(child))
