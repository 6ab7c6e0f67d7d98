"""Adapters with random weights, created without files."""

from __future__ import annotations

import torch

from radixkv.model.adapters.adapter_files import AdapterFiles, LowRank, adaptable_layers
from radixkv.model.model import Model


def random_adapter(model: Model, digest: str, rank: int = 4, seed: int = 0, share: float = 1.0) -> AdapterFiles:
    """Make an adapter of the linear layers of a model.

    Args:
        model: the base model.
        digest: any name.
        rank: of all layers.
        seed: of the weights.
        share: of the layers that are adapted, chosen at random.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, (in_features, out_features, dtype) in adaptable_layers(model.module).items():
        if torch.rand((), generator=generator) <= share:
            down, up = (
                torch.randn(shape, generator=generator) for shape in ((rank, in_features), (out_features, rank))
            )
            layers[name] = LowRank((0.2 * down).to(dtype), (0.4 * up).to(dtype))
    return AdapterFiles(digest, rank, sum(each.num_bytes for each in layers.values()), None, layers)
