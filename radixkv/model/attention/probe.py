"""Runs a model once to find which K/V its layers store and what kind of attention they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionCall, AttentionKind
from radixkv.storage.device_pool import KVHeads, KVShape


class _LayerKV(NamedTuple):
    """K and V of one token in one layer; `value_dim` is None if the key is also the value."""

    num_kv_heads: int
    head_dim: int
    value_dim: int | None
    dtype: torch.dtype


class _Probe:
    """A step without a pool that records what each layer would store in one."""

    def __init__(self) -> None:
        self.kv_by_layer: dict[int, _LayerKV] = {}
        self.kinds: dict[int, AttentionKind] = {}
        self.num_convolutions = 0
        self.has_repeated_layer = False  # whether a layer attended more than once

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scoring = call
        self.has_repeated_layer |= layer in self.kv_by_layer
        value_dim = None if value is None else value.shape[2]
        self.kv_by_layer[layer] = _LayerKV(key.shape[1], key.shape[2], value_dim, key.dtype)
        self.kinds[layer] = AttentionKind(query.shape[1], scoring.window, scoring.softcap, scoring.sinks is not None)
        return query.new_zeros(*query.shape[:2], key.shape[2] if value_dim is None else value_dim)

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.num_convolutions += 1
        return torch.zeros_like(rows)


def probe_attention(
    name: str, forward: Callable[..., object], device: torch.device, num_layers: int
) -> tuple[KVShape, tuple[AttentionKind, ...]]:
    """Run a forward pass over two tokens, and record the attention calls of the layers.

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
    if probe.has_repeated_layer:
        raise UnsupportedModel(f"{name}: expected one attention call per layer and token, got layers that attend again")
    num_kv_layers = num_layers - probe.num_convolutions
    if sorted(probe.kv_by_layer) != list(range(num_kv_layers)) or not probe.kv_by_layer:
        raise UnsupportedModel(
            f"{name}: expected {num_kv_layers} layers to call attention, got {len(probe.kv_by_layer)}; the others keep "
            "state that the cache does not hold"
        )
    layers = range(num_kv_layers)
    shape = _shape_of(name, [probe.kv_by_layer[layer] for layer in layers])
    if shape.heads and probe.num_convolutions:
        raise UnsupportedModel(f"{name}: expected one K/V shape in a model with short convolutions, got several")
    if shape.heads and device.type != "cpu":
        raise UnsupportedModel(
            f"{name}: layers with K/V of different shapes: expected model.device to be cpu, got {device}, where "
            "kernels take one pool"
        )
    return shape, tuple(probe.kinds[layer] for layer in layers)


def _shape_of(name: str, layers: Sequence[_LayerKV]) -> KVShape:
    """Return the K/V shape of at least one layer, or refuse shapes that pools do not support."""
    dtypes = {kv.dtype for kv in layers}
    unsupported_dtypes = dtypes - {torch.float32, torch.bfloat16, torch.float16}
    if unsupported_dtypes:
        raise UnsupportedModel(f"{name}: expected K/V of float32, bfloat16 or float16, got {unsupported_dtypes.pop()}")
    are_latent = {kv.value_dim is None for kv in layers}
    if len(dtypes) > 1 or len(are_latent) > 1:
        raise UnsupportedModel(f"{name}: expected K/V of one dtype, in all layers or in none as latents, got several")
    for kv in layers:
        if kv.value_dim not in (None, kv.head_dim):
            raise UnsupportedModel(
                f"{name}: expected keys and values of one size, got {kv.head_dim} and {kv.value_dim} numbers"
            )
    heads = [KVHeads(kv.num_kv_heads, kv.head_dim) for kv in layers]
    return KVShape.of_layers(heads, dtypes.pop(), is_latent=are_latent.pop())
