"""Runs a model once to find which K/V its layers store and what kind of attention they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionCall, AttentionKind
from radixkv.storage.device_pool import KVHeads, KVShape


class _Stored(NamedTuple):
    """K and V of one token in one layer; `value_dim` is None if the key is also the value."""

    num_kv_heads: int
    head_dim: int
    value_dim: int | None
    dtype: torch.dtype


class _Probe:
    """A step without a pool that records what each layer would store in one."""

    def __init__(self) -> None:
        self.shapes: dict[int, _Stored] = {}
        self.kinds: dict[int, AttentionKind] = {}
        self.num_convolutions = 0
        self.is_repeated = False  # whether a layer attended more than once

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scoring = call
        self.is_repeated |= layer in self.shapes
        value_dim = None if value is None else value.shape[2]
        self.shapes[layer] = _Stored(key.shape[1], key.shape[2], value_dim, key.dtype)
        self.kinds[layer] = AttentionKind(query.shape[1], scoring.window, scoring.softcap, scoring.sinks is not None)
        return query.new_zeros(*query.shape[:2], key.shape[2] if value_dim is None else value_dim)

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.num_convolutions += 1
        return torch.zeros_like(rows)


def probe_attention(
    name: str, forward: Callable[..., object], device: torch.device, num_layers: int
) -> tuple[KVShape, tuple[AttentionKind, ...]]:
    """Run two tokens, and record the attention calls of the layers.

    Args:
        name: name of the model's class.
        forward: `Model.forward`.
        device: device of the model.
        num_layers: expected number of layers.

    Returns:
        The K/V shape of one token, and the kinds of attention of its layers.

    Raises:
        UnsupportedModel: the model keeps state outside of the cache, a layer attends more than once, or the pools do
            not support K and V of the model.
    """
    probe = _Probe()
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    forward(ids, torch.arange(2, device=device), probe, torch.ones(1, dtype=torch.int64, device=device))
    if probe.is_repeated:
        raise UnsupportedModel(f"{name}: expected one attention call per layer and token, got layers that attend again")
    num_layers -= probe.num_convolutions
    if sorted(probe.shapes) != list(range(num_layers)) or not probe.shapes:
        raise UnsupportedModel(
            f"{name}: expected {num_layers} layers to call attention, got {len(probe.shapes)}; the others keep state "
            "that the cache does not hold"
        )
    layers = range(num_layers)
    shape = _shape_of(name, [probe.shapes[layer] for layer in layers])
    if shape.heads and probe.num_convolutions:
        raise UnsupportedModel(f"{name}: expected one K/V shape in a model with short convolutions, got several")
    if shape.heads and device.type != "cpu":
        raise UnsupportedModel(
            f"{name}: layers with K/V of different shapes: expected model.device to be cpu, got {device}, where "
            "kernels take one pool"
        )
    return shape, tuple(probe.kinds[layer] for layer in layers)


def _shape_of(name: str, layers: Sequence[_Stored]) -> KVShape:
    """Return the K/V shape of at least one layer, or refuse shapes that pools do not support."""
    dtypes = {stored.dtype for stored in layers}
    if others := dtypes - {torch.float32, torch.bfloat16, torch.float16}:
        raise UnsupportedModel(f"{name}: expected K/V of float32, bfloat16 or float16, got {others.pop()}")
    are_latent = {stored.value_dim is None for stored in layers}
    if len(dtypes) > 1 or len(are_latent) > 1:
        raise UnsupportedModel(f"{name}: expected K/V of one dtype, in all layers or in none as latents, got several")
    for stored in layers:
        if stored.value_dim not in (None, stored.head_dim):
            raise UnsupportedModel(
                f"{name}: expected keys and values of one size, got {stored.head_dim} and {stored.value_dim} numbers"
            )
    heads = [KVHeads(stored.num_kv_heads, stored.head_dim) for stored in layers]
    return KVShape.of_layers(heads, dtypes.pop(), is_latent=are_latent.pop())
