"""Weights of layers as they were quantized in a file, until `pack_linears` packs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixkv.kernels.quantized_weight import QuantizedWeight

_ATTRIBUTE = "stored_quantized_weight"  # of a layer


def can_keep_stored_weight(layer: nn.Module) -> bool:
    """Whether a layer may have a stored weight."""
    return type(layer) is nn.Linear or isinstance(layer, nn.Embedding)


def keep_stored_weight(layer: nn.Module, weight: QuantizedWeight) -> None:
    """Give a layer a weight that was quantized in a file. The layer must not be called before `pack_linears`.

    Args:
        layer: `can_keep_stored_weight` must be true. Its `weight` may come from `weight_without_data`.
        weight: the quantized weight, with the shape of `layer.weight`.
    """
    setattr(layer, _ATTRIBUTE, weight)


def stored_weight(layer: nn.Module) -> QuantizedWeight | None:
    """Return the weight of `keep_stored_weight`; None if there is none."""
    weight: QuantizedWeight | None = getattr(layer, _ATTRIBUTE, None)
    return weight


def dequantize_stored_weight(layer: nn.Module) -> None:
    """Replace the weight of a layer by its stored weight, dequantized. Does nothing if it has none."""
    stored = stored_weight(layer)
    if stored is not None:
        layer.weight = nn.Parameter(stored.dequantize().to(stored.dtype), requires_grad=False)
        forget_stored_weight(layer)


def forget_stored_weight(layer: nn.Module) -> None:
    """Remove the stored weight from a layer that has one."""
    delattr(layer, _ATTRIBUTE)


def weight_without_data(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of this shape that takes no memory. All of its elements are the same NaN."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype).expand(*shape)
