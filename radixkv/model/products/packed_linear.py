"""Replaces a model's linear layers by products whose weights are laid out once for the fastest library."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from radixkv.kernels.linear_packings import PACKINGS, aligned_rows
from radixkv.kernels.product_trial import ProductChoice
from radixkv.kernels.row_tiles import SIZES, RowTiles, in_tiles
from radixkv.model.products.choices import ProductChoices

_log = logging.getLogger(__name__)

# Rows of a call that makes logits: a step needs few of them.
_LOGIT_ROWS = 64

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Product:
    """The product of rows with one weight, plus a bias.

    Args:
        weight: `[out_features, in_features]`. It is not kept, unless it is laid out right as it is.
        bias: `[out_features]`, or None.
        choice: how it is computed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, choice: ProductChoice) -> None:
        packing = PACKINGS[choice.packing]
        self.out_features, self.in_features = weight.shape
        self._packed = packing.pack(weight)
        self._bias = bias
        self._multiply = packing.multiply
        self._tiles = RowTiles(dict(choice.costs)) if choice.costs else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product with rows `[..., in_features]`: a new tensor `[..., out_features]`."""
        flat = aligned_rows(rows)
        if not len(flat):  # a step that wants no logits
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        if self._tiles is None:
            product = self._multiply(flat, self._packed, self._bias)
        else:
            product = in_tiles(self._call, flat, self._tiles)
        return product.view(*rows.shape[:-1], self.out_features)

    def _call(self, piece: torch.Tensor) -> torch.Tensor:
        return self._multiply(aligned_rows(piece), self._packed, self._bias)


class PackedLinear(nn.Module):
    """A linear layer without parameters: what it needs of them is in its product.

    Args:
        product: what it computes.
    """

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product = product

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product with rows `[..., in_features]`."""
        return self.product(rows)


def pack_linears(module: PreTrainedModel, choices: ProductChoices) -> None:
    """Replace the linear layers of a model on a CPU. Logs how they are computed.

    A weight is freed once it is packed. One that is also an embedding stays beside its packed copy. A layer whose rows
    can't be computed alike stays as it is.

    Args:
        module: the model, in evaluation mode. Its linear layers must not have been replaced yet.
        choices: how products are computed.
    """
    head = module.get_output_embeddings()
    packed: dict[nn.Module, PackedLinear] = {}
    counts: Counter[str] = Counter()
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if child not in packed:
                product = _product(child, choices, _LOGIT_ROWS if child is head else SIZES[-1])
                if product is None:
                    continue
                packed[child] = PackedLinear(product[1])
                counts[product[0]] += 1
            setattr(part, name, packed[child])
    if counts:
        _log.info("products: %s", ", ".join(f"{count} {name}" for name, count in counts.most_common()))


def _product(layer: nn.Module, choices: ProductChoices, most_rows: int) -> tuple[str, Product] | None:
    """Pack a linear layer. Returns the name of the packing and the product; None for what must stay as it is."""
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return None
    if type(layer) not in (nn.Linear, Conv1D):
        return None
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    weight, bias = parameters["weight"], parameters.get("bias")
    if type(layer) is Conv1D:
        weight = weight.t()
    if weight.dtype not in _DTYPES or (bias is not None and bias.dtype != weight.dtype) or not weight.numel():
        return None
    choice = choices.choose(weight, bias, most_rows=most_rows)
    return None if choice is None else (choice.packing, Product(weight, bias, choice))
