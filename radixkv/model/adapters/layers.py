"""The layers of a model that an adapter may adapt, by name: linear layers that see each row of a step once."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from radixkv.model.attention.latent_heads import absorbed_layers
from radixkv.model.products.packed_linear import PackedLinear, PackedSlice


class LayerShape(NamedTuple):
    """Features of a linear layer."""

    in_features: int
    out_features: int


def adaptable_layers(module: PreTrainedModel) -> dict[str, LayerShape]:
    """Find the linear layers of a model, packed or not, by the names that transformers gives them.

    The head is not among them: it makes logits of few rows. Nor are experts, which see some of the rows, and the layers
    of `absorbed_layers`.
    """
    left_out = {id(module.get_output_embeddings()), *map(id, absorbed_layers(module))}
    return {
        name: shape
        for name, part in module.named_modules()
        if id(part) not in left_out and ".experts." not in name and (shape := _shape_of(part)) is not None
    }


def _shape_of(part: nn.Module) -> LayerShape | None:
    if isinstance(part, (nn.Linear, PackedLinear, PackedSlice)):
        return LayerShape(part.in_features, part.out_features)
    if type(part) is Conv1D:
        in_features, out_features = map(int, part.get_parameter("weight").shape)
        return LayerShape(in_features, out_features)
    return None
