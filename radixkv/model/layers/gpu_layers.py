"""Fuses parts of a model on a GPU: norms, the gate of an MLP, and a residual sum with the norm that follows it.

    module      children                                                 fused kernel
    RMS norm    none; weight and eps                                     rms_norm
    gated MLP   gate_proj, up_proj, act_fn, down_proj                    swiglu, between the matmuls
    layer       input_layernorm, self_attn, post_attention_layernorm,    add_rms_norm, between its halves
                mlp

Whether a part is replaced does not depend on its class: each part is compared with its fused kernel at load, on random
rows. In this trial, matmuls and attention are replaced by functions that only permute and scale numbers, so that only
the operations of the kernel are compared. In exact mode, the result of a row must also be bitwise identical alone and
in a batch.
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
    LAYER_PARTS,
    MLP_PARTS,
    Forward,
    Refused,
    ReplacedParts,
    agree,
    eps_of,
    has_hooks,
    is_norm,
    require,
    rows_agree,
    with_replaced_children,
)

# Keywords that models pass to a layer for its attention.
_ATTENTION_KEYWORDS = ("position_embeddings", "attention_mask", "position_ids", "radix_step")


class FusedGpuLayers(ReplacedParts):
    """Replaces known parts of a model by fused kernels.

    Args:
        module: the model, on its device and in evaluation mode.
        is_exact: whether results must be batch-invariant.
    """

    def __init__(self, module: nn.Module, *, is_exact: bool) -> None:
        self._dtype = next(module.parameters()).dtype
        self._is_exact = is_exact
        self._styles: dict[nn.Module, NormStyle] = {}  # of the norms that passed their trial
        super().__init__(module, self._try_part)

    def _try_part(self, part: Any) -> Forward | None:
        """Return the replacement of a part's forward pass; see `known_forward` in `ReplacedParts`."""
        children = {name for name, _ in part.named_children()}
        if is_norm(part, self._dtype):
            self._styles[part] = self._try_style(part)
            return partial(_norm_forward, style=self._styles[part])
        if children == MLP_PARTS:
            self._try_mlp(part)
            return _mlp_forward
        if children == LAYER_PARTS and part.post_attention_layernorm in self._styles:
            forward = partial(_layer_forward, style=self._styles[part.post_attention_layernorm])
            self._try_layer(part, forward)
            return forward
        return None

    def _try_style(self, norm: Any) -> NormStyle:
        for style in (LLAMA, GEMMA, TORCH):
            fused = partial(_norm_forward, norm, style=style)
            if agree(norm.forward, fused, norm.weight):
                self._require_exact_rows(fused, norm.weight)
                return style
        raise Refused("it computes something else")

    def _try_mlp(self, mlp: Any) -> None:
        simplified = with_replaced_children(
            mlp, {"gate_proj": lambda rows: rows, "up_proj": lambda rows: rows.flip(-1), "down_proj": lambda rows: rows}
        )
        fused = partial(_mlp_forward, simplified)
        like = torch.empty(mlp.down_proj.in_features, dtype=self._dtype, device=mlp.down_proj.weight.device)
        require(agree(simplified.forward, fused, like))
        self._require_exact_rows(fused, like)

    def _try_layer(self, layer: Any, forward: Forward) -> None:
        """Try a layer, and check that it passes its keywords on to the attention."""
        passed_on = {name: object() for name in _ATTENTION_KEYWORDS}
        was_passed_on: list[bool] = []

        def attend(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            was_passed_on.append(all(kwargs.get(name) is value for name, value in passed_on.items()))
            return hidden_states.roll(1, -1) / 2, None

        simplified = with_replaced_children(layer, {"self_attn": attend, "mlp": lambda rows: rows.flip(-1) / 4})
        keywords = {**passed_on, "use_cache": False}
        fused = partial(forward, simplified, **keywords)
        like = layer.post_attention_layernorm.weight
        require(agree(partial(simplified.forward, **keywords), fused, like) and all(was_passed_on))
        self._require_exact_rows(fused, like)

    def _require_exact_rows(self, fused: Forward, like: torch.Tensor) -> None:
        if self._is_exact and not rows_agree(fused, like):
            raise Refused("its results are not batch-invariant")


def _norm_forward(norm: Any, rows: torch.Tensor, *, style: NormStyle) -> torch.Tensor:
    return rms_norm(rows, norm.weight, eps_of(norm), style)


def _mlp_forward(mlp: Any, rows: torch.Tensor) -> Any:
    if has_hooks(mlp.act_fn):
        return type(mlp).forward(mlp, rows)
    return mlp.down_proj(swiglu(mlp.gate_proj(rows), mlp.up_proj(rows)))


def _layer_forward(layer: Any, hidden_states: torch.Tensor, *args: Any, style: NormStyle, **kwargs: Any) -> Any:
    norm = layer.post_attention_layernorm
    if args or has_hooks(norm):
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    residual, normed = add_rms_norm(attended, hidden_states, norm.weight, eps_of(norm), style)
    return residual + layer.mlp(normed)
