"""Finds out what a model stores in each layer and asks of attention, by running it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKind
from radixkv.storage.device_pool import KVShape


class _Probe:
    """A step without a pool that records what each layer would store in one."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int | None, torch.dtype]] = {}
        self.kinds: dict[AttentionKind, None] = {}
        self.windows: dict[int, int | None] = {}
        self.num_convolutions = 0
        self.is_repeated = False  # whether a layer attended more than once

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        self.is_repeated |= layer in self.shapes
        value_dim = None if value is None else value.shape[2]
        self.shapes[layer] = (key.shape[1], key.shape[2], value_dim, key.dtype)
        self.windows[layer] = scoring.window
        self.kinds[AttentionKind(query.shape[1], scoring.window, scoring.softcap, scoring.sinks is not None)] = None
        return query.new_zeros(*query.shape[:2], key.shape[2] if value_dim is None else value_dim)

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.num_convolutions += 1
        return torch.zeros_like(rows)


def probe_attention(
    name: str, forward: Callable[..., object], device: torch.device, num_layers: int
) -> tuple[KVShape, tuple[AttentionKind, ...], tuple[int | None, ...]]:
    """Run two tokens, and read what the layers store and ask for.

    Args:
        name: of the model's class.
        forward: `Model.forward`.
        device: of the model.
        num_layers: layers that the model should have.

    Returns:
        K and V of one token, what layers ask of attention, each kind once, and the window of each layer.

    Raises:
        UnsupportedModel: the model keeps state elsewhere, or its layers store different K/V.
    """
    probe = _Probe()
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    forward(ids, torch.arange(2, device=device), probe, torch.ones(1, dtype=torch.int64, device=device))
    if probe.is_repeated:
        raise UnsupportedModel(f"{name}: expected each layer to attend once a token, got layers that attend again")
    num_layers -= probe.num_convolutions
    if sorted(probe.shapes) != list(range(num_layers)) or not probe.shapes:
        raise UnsupportedModel(
            f"{name}: expected {num_layers} layers to call attention, got {len(probe.shapes)}; the others keep state "
            "that the cache does not hold"
        )
    shapes = set(probe.shapes.values())
    num_kv_heads, head_dim, value_dim, dtype = next(iter(shapes))
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModel(f"{name}: expected K/V of float32, bfloat16 or float16, got {dtype}")
    if len(shapes) > 1 or value_dim not in (None, head_dim):
        raise UnsupportedModel(f"{name}: expected one K/V shape in all layers, got {sorted(map(str, shapes))}")
    shape = KVShape(num_layers, num_kv_heads, head_dim, dtype, is_latent=value_dim is None)
    return shape, tuple(probe.kinds), tuple(probe.windows[layer] for layer in range(num_layers))
