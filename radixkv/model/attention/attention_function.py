"""The attention function that transformers calls in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall, AttentionStep
from radixkv.model.attention.latent import latent_heads_of
from radixkv.model.attention.paged_step import RunningPass

ATTENTION_NAME = "radixkv_paged"

# Keywords that models may pass to an attention function and that do not change the result of a causal prefill.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_router_logits"}
)


def kv_layer_of(module: Any) -> int:
    """Return the index of a layer among those that have K and V; layers that keep a state are not counted."""
    return int(getattr(module, "kv_layer", module.layer_idx))


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_query_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor | None,  # like the key, or with a smaller head_dim; None for latent attention
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    radix_step: AttentionStep | None = None,
    **other_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer. Transformers calls this in every attention layer.

    Returns:
        The attention output `[1, num_tokens, num_query_heads, value_dim]`, and None instead of attention weights.

    Raises:
        UnsupportedModel: the layer requires something that the kernels do not support; the message names it.
    """
    layer_name = type(module).__name__
    if radix_step is None:
        running_pass = getattr(module, "running_pass", None)
        radix_step = running_pass.step if isinstance(running_pass, RunningPass) else None
    if radix_step is None:
        raise UnsupportedModel(f"{layer_name}: expected to attend within a forward pass over the cache, got none")
    if not hasattr(module, "layer_idx"):
        raise UnsupportedModel(f"{layer_name}: expected an attribute `layer_idx`, got none")
    if not getattr(module, "is_causal", True) or other_arguments.get("is_causal") is False:
        raise UnsupportedModel(f"{layer_name}: expected causal attention, got attention that looks ahead")
    if attention_mask is not None or dropout:
        raise UnsupportedModel(
            f"{layer_name}: expected no attention mask and no dropout, got a mask or dropout {dropout}"
        )
    for name, argument in other_arguments.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(f"{layer_name}: passes `{name}` to its attention, which is not supported")
    if s_aux is not None and (s_aux.shape != query.shape[1:2] or softcap is not None):
        raise UnsupportedModel(
            f"{layer_name}: expected `s_aux` with one sink per query head, and no `softcap`, got sinks of shape "
            f"{tuple(s_aux.shape)} and softcap {softcap}"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    queries, keys = query[0].transpose(0, 1), key[0].transpose(0, 1)
    layer = kv_layer_of(module)
    if value is not None:
        value_dim, missing_dims = value.shape[3], key.shape[3] - value.shape[3]
        if missing_dims > 0:  # pools store values with the head_dim of keys
            value = pad(value, (0, missing_dims))
        values = value[0].transpose(0, 1)
        return radix_step.attend(AttentionCall(layer, queries, keys, values, scoring))[None, ..., :value_dim], None
    heads = latent_heads_of(module)
    attended = radix_step.attend(AttentionCall(layer, heads.queries(queries), keys, None, scoring))
    return heads.values(attended)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
