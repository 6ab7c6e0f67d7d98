"""Runs known parts of a model as one kernel each: norms, gates, and the sum before a layer's second norm.

    RMS norm    weight, eps                                              rms_norm
    gated MLP   gate_proj, up_proj, act_fn, down_proj                    swiglu between the products
    layer       input_layernorm, self_attn, post_attention_layernorm,    add_rms_norm between its halves
                mlp

A part is not recognized by its class. It is tried beside the kernel at load, on random rows. In the trial, stand-ins
that only move numbers replace the products and the attention, so that only what the kernel replaces is compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.kernels.gpu.norm import add_rms_norm, rms_norm
from radixkv.kernels.gpu.swiglu import swiglu
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH, NormStyle
from radixkv.model.layers.replaced_parts import (
    Forward,
    Refused,
    ReplacedParts,
    agree,
    eps_of,
    has_hooks,
    is_norm,
    with_stand_ins,
)
from radixkv.model.refusals import reason_of

_MLP_PARTS = {"gate_proj", "up_proj", "act_fn", "down_proj"}
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}

# Keywords that models pass to a layer for its attention.
_PASSED_ON = ("position_embeddings", "attention_mask", "position_ids", "radix_step")


class FusedGpuLayers(ReplacedParts):
    """Runs known parts of a model as kernels.

    Args:
        module: the model, on its device and in evaluation mode.
    """

    def __init__(self, module: nn.Module) -> None:
        dtype, styles = next(module.parameters()).dtype, dict[nn.Module, NormStyle]()
        super().__init__(module, lambda part: _known_forward(part, dtype, styles))


def _known_forward(part: Any, dtype: torch.dtype, styles: dict[nn.Module, NormStyle]) -> Forward | None:
    """Find the replacement of a part's forward pass, which is called with the part first.

    Args:
        part: a module of the model.
        dtype: dtype of the model's parameters.
        styles: styles of the norms that were tried before. If the part is a norm, its style is added.

    Returns:
        The replacement; None if the part does not look known.

    Raises:
        Refused: the part looks known, but fails its trial.
    """
    if "forward" in vars(part):  # another library replaced it
        return None
    children = {name for name, _ in part.named_children()}
    try:
        with torch.inference_mode():
            if is_norm(part, dtype):
                styles[part] = _tried_style(part)
                return partial(_normed, style=styles[part])
            if children == _MLP_PARTS:
                _try_mlp(part, dtype)
                return _gated
            if children == _LAYER_PARTS and (style := styles.get(part.post_attention_layernorm)) is not None:
                forward = partial(_added, style=style)
                _try_layer(part, forward)
                return forward
    except Refused:
        raise
    except Exception as error:  # what a compiler raises, or a module that wants to be called otherwise
        raise Refused(reason_of(error)) from error
    return None


def _normed(norm: Any, rows: torch.Tensor, *, style: NormStyle) -> torch.Tensor:
    return rms_norm(rows, norm.weight, eps_of(norm), style)


def _gated(mlp: Any, rows: torch.Tensor) -> Any:
    if has_hooks(mlp.act_fn):
        return type(mlp).forward(mlp, rows)
    return mlp.down_proj(swiglu(mlp.gate_proj(rows), mlp.up_proj(rows)))


def _added(layer: Any, hidden_states: torch.Tensor, *args: Any, style: NormStyle, **kwargs: Any) -> Any:
    norm = layer.post_attention_layernorm
    if args or has_hooks(norm):
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    residual, normed = add_rms_norm(attended, hidden_states, norm.weight, eps_of(norm), style)
    return residual + layer.mlp(normed)


def _tried_style(norm: Any) -> NormStyle:
    for style in (LLAMA, GEMMA, TORCH):
        if agree(norm.forward, partial(_normed, norm, style=style), norm.weight):
            return style
    raise Refused("it computes something else")


def _try_mlp(mlp: Any, dtype: torch.dtype) -> None:
    played = with_stand_ins(
        mlp, {"gate_proj": lambda rows: rows, "up_proj": lambda rows: rows.flip(-1), "down_proj": lambda rows: rows}
    )
    like = torch.empty(mlp.down_proj.in_features, dtype=dtype, device=mlp.down_proj.weight.device)
    if not agree(played.forward, partial(_gated, played), like):
        raise Refused("it computes something else")


def _try_layer(layer: Any, forward: Forward) -> None:
    """Try a layer, and check that it passes its keywords on to the attention."""
    passed_on = {name: object() for name in _PASSED_ON}
    heard: list[bool] = []

    def attend(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        heard.append(all(kwargs.get(name) is value for name, value in passed_on.items()))
        return hidden_states.roll(1, -1) / 2, None

    played = with_stand_ins(layer, {"self_attn": attend, "mlp": lambda rows: rows.flip(-1) / 4})
    handed = {**passed_on, "use_cache": False}
    own, fused = partial(played.forward, **handed), partial(forward, played, **handed)
    if not (agree(own, fused, layer.post_attention_layernorm.weight) and all(heard)):
        raise Refused("it computes something else")
