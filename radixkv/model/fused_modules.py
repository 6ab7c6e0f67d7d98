"""Runs known parts of a model as one kernel each: norms, gates, and the sum before a layer's second norm.

    RMS norm    weight, eps                                              rms_norm
    gated MLP   gate_proj, up_proj, act_fn, down_proj                    swiglu between the products
    layer       input_layernorm, self_attn, post_attention_layernorm,    add_rms_norm between its halves
                mlp

A part is not recognized by its class. It is tried beside the kernel at load, on random rows. In the trial, stand-ins
that only move numbers replace the products and the attention, so that only what the kernel replaces is compared.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from radixkv.kernels.flat_rows import DTYPES
from radixkv.kernels.norm import add_rms_norm, rms_norm
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH, NormStyle
from radixkv.kernels.swiglu import swiglu
from radixkv.model.refusals import reason_of

_log = logging.getLogger(__name__)

Forward = Callable[..., Any]

_MLP_PARTS = {"gate_proj", "up_proj", "act_fn", "down_proj"}
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}

# Keywords that models pass to a layer for its attention.
_PASSED_ON = ("position_embeddings", "attention_mask", "position_ids", "radix_step")

# Rows of a trial: one, and an odd number. The sizes of their numbers run from 0.001, where eps matters, to 10.
_NUM_ROWS = (1, 17)
_NUM_SIZES = 5

# Tolerances, relative to a row's largest number. Float32 sums depend on their order, and rounding to fewer digits may
# then go the other way, twice. It seldom does: of numbers that are off by 1e-6 one in a thousand in float16, fewer in
# bfloat16. Rounding in another order changes one number in four, and a scale of 1.01 changes all.
_FLOAT32_TOLERANCE = 1e-5
_ROUNDINGS = 2
_LARGEST_SHARE = 0.05


class FusedModules:
    """Replaces `forward` of known parts of a model by kernels. Nothing outside this model changes.

    A part that looks known but computes something else stays as it is, and the log names its class once. While a
    module that a kernel replaces has hooks, its part runs as transformers wrote it, so that the hooks are called.

    Args:
        module: the model, on its device and in evaluation mode.

    Attributes:
        names: names of the replaced parts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forwards: dict[nn.Module, Forward] = {}
        names: list[str] = []
        refused: dict[str, str] = {}  # by class
        styles: dict[nn.Module, NormStyle] = {}
        own_dtype = next(module.parameters()).dtype
        # A layer comes after its norms. Nothing is replaced before the last trial.
        for name, part in reversed(list(module.named_modules())):
            try:
                forward = _known_forward(part, own_dtype, styles)
            except _Refused as refusal:
                refused[type(part).__name__] = str(refusal)
            else:
                if forward is not None:
                    names.append(name)
                    self._forwards[part] = partial(forward, part)
        self.names = tuple(reversed(names))
        for class_name, reason in refused.items():
            _log.info("%s does not run as a kernel: %s", class_name, reason)
        self._replace()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let all parts run as transformers wrote them, inside the `with` block."""
        for part in self._forwards:
            del vars(part)["forward"]
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        for part, forward in self._forwards.items():
            vars(part)["forward"] = forward


class _Refused(Exception):
    """A part that looks known failed its trial. The message says why."""


def _known_forward(part: Any, dtype: torch.dtype, styles: dict[nn.Module, NormStyle]) -> Forward | None:
    """Find the replacement of a part's forward pass, which is called with the part first.

    Args:
        part: a module of the model.
        dtype: dtype of the model's parameters.
        styles: styles of the norms that were tried before. If the part is a norm, its style is added.

    Returns:
        The replacement; None if the part does not look known.

    Raises:
        _Refused: the part looks known, but fails its trial.
    """
    if "forward" in vars(part):  # another library replaced it
        return None
    children = {name for name, _ in part.named_children()}
    try:
        with torch.inference_mode():
            if _is_norm(part, dtype):
                styles[part] = _tried_style(part)
                return partial(_normed, style=styles[part])
            if children == _MLP_PARTS:
                _try_mlp(part, dtype)
                return _gated
            if children == _LAYER_PARTS and (style := styles.get(part.post_attention_layernorm)) is not None:
                forward = partial(_added, style=style)
                _try_layer(part, forward)
                return forward
    except _Refused:
        raise
    except Exception as error:  # what a compiler raises, or a module that wants to be called otherwise
        raise _Refused(reason_of(error)) from error
    return None


def _is_norm(part: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a part has the parameters of an RMS norm, in the dtype of the model's rows."""
    parameters = dict(part.named_parameters())
    weight = parameters.get("weight")
    return (
        parameters.keys() == {"weight"}
        and weight is not None
        and weight.dim() == 1
        and weight.dtype == dtype
        and dtype in DTYPES
        and isinstance(_eps(part), float)
        and not list(part.children())
    )


def _eps(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _normed(norm: Any, rows: torch.Tensor, *, style: NormStyle) -> torch.Tensor:
    return rms_norm(rows, norm.weight, _eps(norm), style)


def _gated(mlp: Any, rows: torch.Tensor) -> Any:
    if _has_hooks(mlp.act_fn):
        return type(mlp).forward(mlp, rows)
    return mlp.down_proj(swiglu(mlp.gate_proj(rows), mlp.up_proj(rows)))


def _added(layer: Any, hidden_states: torch.Tensor, *args: Any, style: NormStyle, **kwargs: Any) -> Any:
    norm = layer.post_attention_layernorm
    if args or _has_hooks(norm):
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    residual, normed = add_rms_norm(attended, hidden_states, norm.weight, _eps(norm), style)
    return residual + layer.mlp(normed)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _tried_style(norm: Any) -> NormStyle:
    for style in (LLAMA, GEMMA, TORCH):
        if _agree(norm.forward, partial(_normed, norm, style=style), norm.weight):
            return style
    raise _Refused("it computes something else")


def _try_mlp(mlp: Any, dtype: torch.dtype) -> None:
    played = _with_stand_ins(
        mlp, {"gate_proj": lambda rows: rows, "up_proj": lambda rows: rows.flip(-1), "down_proj": lambda rows: rows}
    )
    like = torch.empty(mlp.down_proj.in_features, dtype=dtype, device=mlp.down_proj.weight.device)
    if not _agree(played.forward, partial(_gated, played), like):
        raise _Refused("it computes something else")


def _try_layer(layer: Any, forward: Forward) -> None:
    """Try a layer, and check that it passes its keywords on to the attention."""
    passed_on = {name: object() for name in _PASSED_ON}
    heard: list[bool] = []

    def attend(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        heard.append(all(kwargs.get(name) is value for name, value in passed_on.items()))
        return hidden_states.roll(1, -1) / 2, None

    played = _with_stand_ins(layer, {"self_attn": attend, "mlp": lambda rows: rows.flip(-1) / 4})
    handed = {**passed_on, "past_key_values": None, "use_cache": False}
    own, fused = partial(played.forward, **handed), partial(forward, played, **handed)
    if not (_agree(own, fused, layer.post_attention_layernorm.weight) and all(heard)):
        raise _Refused("it computes something else")


def _with_stand_ins(part: nn.Module, players: Mapping[str, Forward]) -> nn.Module:
    """Copy a part and replace some of its children by functions. The copy shares its other children."""
    played = copy.copy(part)
    played._modules = dict(part._modules)
    for name, play in players.items():
        stand_in = nn.Module()
        stand_in.forward = play
        played._modules[name] = stand_in
    return played


def _agree(own: Forward, fused: Forward, like: torch.Tensor) -> bool:
    """Whether two functions of rows agree but for few roundings.

    Args:
        own: takes rows `[1, num_rows, num_columns]` and returns a tensor.
        fused: the replacement of `own`.
        like: `[num_columns]`, in the rows' dtype and on their device.
    """
    generator = torch.Generator().manual_seed(0)
    num_different, num_numbers = 0, 0
    for num_rows in _NUM_ROWS:
        sizes = 10.0 ** (torch.arange(num_rows) % _NUM_SIZES - 3)  # [num_rows]
        rows = sizes[:, None] * torch.randn(1, num_rows, like.shape[0], generator=generator)
        expected, got = (function(rows.to(like)) for function in (own, fused))
        if not isinstance(expected, torch.Tensor) or (got.shape, got.dtype) != (expected.shape, expected.dtype):
            return False
        wide = expected.double()
        tolerance = max(_FLOAT32_TOLERANCE, _ROUNDINGS * torch.finfo(like.dtype).eps)
        bound = tolerance * wide.abs().amax(-1, keepdim=True)
        if not bool(((got.double() - wide).abs() <= bound).all()):
            return False
        num_different += int((got != expected).sum())
        num_numbers += got.numel()
    return like.dtype == torch.float32 or num_different <= _LARGEST_SHARE * num_numbers
