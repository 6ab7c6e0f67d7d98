"""Decoder layers in one C++ call: a layer, or all layers of a decoder, whose parts are all in C++.

A step allows one C++ call if it provides a view of the K/V of the layers. In a prefill, the last layer of a decoder is
called by itself, because `LastLayer` computes only the rows whose logits are needed.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.native.layer import LayerParts, NativeLayers, Weights
from radixkv.kernels.native.rows import NativeNorm, NativeRows
from radixkv.model.attention.interface import AttentionStep
from radixkv.model.layers.fused_attention import FusedAttention, has_only_step
from radixkv.model.layers.gated_mlp import GatedMLP
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.layers.replaced_parts import Forward, hooks_of, require

_DECODER_TRIAL_TOKENS = 3


class NativeLayerCall:
    """Consecutive decoder layers whose parts are all in C++.

    Args:
        library: the C++ kernels; see `load_library`.
        parts: the norms and matmuls of each layer.
        attentions: the attention of each layer, alike in heads and scoring.

    Attributes:
        accepts: see `FusedAttention.accepts`.
    """

    def __init__(self, library: ctypes.CDLL, parts: Sequence[LayerParts], attentions: Sequence[FusedAttention]) -> None:
        self._library = library
        self._parts = parts
        self._attentions = attentions
        self._layers = NativeLayers(library, parts)
        self._indices = [attention.layer for attention in attentions]
        self.accepts = attentions[0].accepts

    @classmethod
    def joined(cls, calls: Sequence[NativeLayerCall]) -> NativeLayerCall | None:
        """Return one call that computes the layers of several calls; None if their attention differs or has sinks."""
        attentions = [attention for call in calls for attention in call._attentions]
        shapes = {(each.num_query_heads, each.num_kv_heads, each.head_dim) for each in attentions}
        scoring = attentions[0].scoring
        if len(shapes) > 1 or any(each.scoring != scoring or each.scoring.sinks is not None for each in attentions):
            return None
        return cls(calls[0]._library, [parts for call in calls for parts in call._parts], attentions)

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor | None:
        """Compute the layers for rows `[1, num_tokens, hidden_size]`. `accepts` must be true.

        Returns:
            A new tensor of the same shape; None, with nothing computed, if the step has no view of the layers' K/V, or
            the rows are not contiguous.
        """
        view = getattr(step, "view", None)
        if view is None or not rows.is_contiguous():
            return None
        first = self._attentions[0]
        kv_view = view(self._indices, self._layers.queries(rows.shape[1]), first.num_kv_heads, first.scoring)
        return None if kv_view is None else self._layers(rows, *position_embeddings, kv_view)


class _NotInOneCall(Exception):
    """A part of a layer is not in C++, or not in a form that layer.cpp supports."""


def layer_in_one_call(
    library: ctypes.CDLL,
    rows: NativeRows,
    norms: tuple[RowFunction, RowFunction],
    attention: FusedAttention,
    mlp: GatedMLP,
) -> NativeLayerCall | None:
    """Return a layer that is computed by one call; None if a part is not in C++, or a norm covers several heads.

    Args:
        library: the C++ kernels; see `load_library`.
        rows: the C++ functions of rows.
        norms: the norms before the attention and before the MLP.
        attention, mlp: the other parts.
    """
    if mlp.up is None and mlp.gate_rows != rows.gate:
        return None
    try:
        first, second = map(_require_native_norm, norms)
        head_norms = [_require_head_norm(norm, attention.head_dim) for norm in attention.norms]
        query, key = head_norms or (None, None)
        parts = LayerParts(
            first=first,
            second=second,
            heads=_require_native_weights(attention.qkv),
            query=query,
            key=key,
            attended=_require_native_weights(attention.project_output),
            gate=_require_native_weights(mlp.gate),
            up=None if mlp.up is None else _require_native_weights(mlp.up),
            down=_require_native_weights(mlp.down),
            num_query_heads=attention.num_query_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
        )
    except _NotInOneCall:
        return None
    return NativeLayerCall(library, [parts], [attention])


def _require_native_norm(norm: RowFunction) -> NativeNorm:
    if not isinstance(norm, NativeNorm):
        raise _NotInOneCall
    return norm


def _require_head_norm(norm: RowFunction, head_dim: int) -> NativeNorm:
    native = _require_native_norm(norm)
    if len(native.weight) != head_dim:  # OLMo 2 normalizes all heads of a token as one row
        raise _NotInOneCall
    return native


def _require_native_weights(matmul: RowFunction) -> Weights:
    weights = matmul.native_weights if isinstance(matmul, Matmul) else None
    if weights is None:
        raise _NotInOneCall
    return weights


def try_decoder(decoder: Any, calls: Sequence[NativeLayerCall]) -> Forward | None:
    """Return the forward pass of a decoder that computes its layers in one call, after checking it.

    The trial replaces the layers, and checks what the decoder passes to them and what it does with their rows.

    Returns:
        The forward pass; None if the decoder has a single layer, or its layers cannot be joined.

    Raises:
        Refused: the decoder does something else than `_decoder_forward`.
    """
    all_layers = NativeLayerCall.joined(calls) if len(calls) > 1 else None
    all_but_last = None if all_layers is None else NativeLayerCall.joined(calls[:-1])
    if all_layers is None or all_but_last is None:
        return None
    step: Any = object()
    passed_kwargs = []  # to each layer

    def permuted(rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(1, -1) / 2

    def stand_in(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        passed_kwargs.append(kwargs)
        return permuted(hidden_states)

    def stand_in_for_all(rows: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], _: AttentionStep) -> Any:
        require(len(passed_kwargs) == len(decoder.layers))
        for kwargs in passed_kwargs:
            require(has_only_step(kwargs) and kwargs["radix_step"] is step)
            require(all(map(torch.equal, kwargs["position_embeddings"], embeddings)))
            rows = permuted(rows)
        return rows

    ids = torch.arange(_DECODER_TRIAL_TOKENS)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": ids, "use_cache": False, "radix_step": step}
    simplified = copy.copy(decoder)
    stand_ins = nn.ModuleList(nn.Module() for _ in decoder.layers)
    for each in stand_ins:
        each.forward = stand_in
    simplified._modules = {**decoder._modules, "layers": stand_ins}
    expected = simplified.forward(**arguments)
    forward = partial(_decoder_forward, accepts=all_layers.accepts, all_but_last=all_but_last)
    got = forward(decoder, hooks=(), last_hooks=(), all_layers=stand_in_for_all, **arguments)
    require(type(expected) is type(got) and torch.equal(expected.last_hidden_state, got.last_hidden_state))
    last = decoder.layers[-1]
    hooks = hooks_of(part for part in decoder.modules() if part is not decoder and part is not last)
    return partial(forward, hooks=hooks, last_hooks=hooks_of([last]), all_layers=all_layers)


def _decoder_forward(
    decoder: Any,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    last_hooks: Sequence[Mapping[int, object]],
    all_layers: Callable[..., torch.Tensor | None],
    all_but_last: Callable[..., torch.Tensor | None],
    accepts: Callable[..., bool],
    input_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    radix_step: AttentionStep | None = None,
    **kwargs: Any,
) -> Any:
    has_only_known_arguments = not args and all(each is None or each is False for each in kwargs.values())
    if has_only_known_arguments and input_ids is not None and position_ids is not None and not any(hooks):
        rows = decoder.embed_tokens(input_ids)
        embeddings = decoder.rotary_emb(rows, position_ids)
        # The last layer is called by itself if it has hooks, such as that of `LastLayer`.
        calls_last = any(last_hooks)
        native_call = all_but_last if calls_last else all_layers
        with torch._C.DisableTorchFunction():
            output = native_call(rows, embeddings, radix_step) if accepts(rows, embeddings) else None
        if output is not None:
            if calls_last:
                output = decoder.layers[-1](output, position_embeddings=embeddings, radix_step=radix_step)
            return BaseModelOutputWithPast(last_hidden_state=decoder.norm(output))
    kwargs |= {"input_ids": input_ids, "position_ids": position_ids}
    kwargs |= {} if radix_step is None else {"radix_step": radix_step}
    return type(decoder).forward(decoder, *args, **kwargs)
