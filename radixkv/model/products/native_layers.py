"""Runs a known layer of a model in one call, where all that it computes is in C++."""

from __future__ import annotations

import ctypes

import torch

from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.native.layer import LayerParts, NativeLayer, Weights
from radixkv.kernels.native.rows import NativeNorm, NativeRows
from radixkv.model.attention.interface import AttentionStep
from radixkv.model.products.gated_mlp import GatedMLP
from radixkv.model.products.joined_attention import JoinedAttention
from radixkv.model.products.packed_linear import Product


class LayerInOneCall:
    """A layer whose parts are all in C++.

    Args:
        library: of `load_library`.
        parts: what it computes.
        attention: of the same layer.
    """

    def __init__(self, library: ctypes.CDLL, parts: LayerParts, attention: JoinedAttention) -> None:
        self._layer = NativeLayer(library, parts)
        self._attention = attention

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor | None:
        """Compute the layer of rows `[1, num_tokens, hidden_size]`, with cosines and sines that its attention takes.

        Returns:
            A new tensor of the same shape; None, with nothing computed, if the step wants to be asked to attend, or
            rows do not lie in order.
        """
        view = getattr(step, "view", None)
        if view is None or not rows.is_contiguous():
            return None
        own = self._attention
        found = view(own.layer, self._layer.queries(rows.shape[1]), own.num_kv_heads, own.scoring)
        return None if found is None else self._layer(rows, *position_embeddings, found)


class _NotInOneCall(Exception):
    """A part of a layer is not in C++, or not as layer.cpp calls it."""


def layer_in_one_call(
    library: ctypes.CDLL,
    rows: NativeRows,
    norms: tuple[RowFunction, RowFunction],
    attention: JoinedAttention,
    mlp: GatedMLP,
) -> LayerInOneCall | None:
    """Return a layer in one call; None if something that it computes is not in C++, or norms several heads at once.

    Args:
        library: of `load_library`.
        rows: its functions of rows.
        norms: before attention, and before the MLP.
        attention, mlp: the other parts.
    """
    if mlp.up is None and mlp.gate_rows != rows.gate:
        return None
    try:
        first, second = map(_norm, norms)
        heads_norms = [_head_norm(norm, attention.head_dim) for norm in attention.norms]
        query, key = heads_norms or (None, None)
        parts = LayerParts(
            *(first, second, _weights(attention.product), query, key, _weights(attention.down)),
            *(_weights(mlp.gate), None if mlp.up is None else _weights(mlp.up), _weights(mlp.down)),
            *(attention.num_query_heads, attention.num_kv_heads, attention.head_dim),
        )
    except _NotInOneCall:
        return None
    return LayerInOneCall(library, parts, attention)


def _norm(norm: RowFunction) -> NativeNorm:
    if not isinstance(norm, NativeNorm):
        raise _NotInOneCall
    return norm


def _head_norm(norm: RowFunction, head_dim: int) -> NativeNorm:
    native = _norm(norm)
    if len(native.weight) != head_dim:  # OLMo 2 norms all heads of a token as one row
        raise _NotInOneCall
    return native


def _weights(product: RowFunction) -> Weights:
    weights = product.native_weights if isinstance(product, Product) else None
    if weights is None:
        raise _NotInOneCall
    return weights
