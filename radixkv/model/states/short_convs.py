"""Makes layers of short convolutions keep their states in the pool instead of in a cache of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.model.states.state_step import StateRows, StateStep
from radixkv.storage.state_pool import StatePool, StateShape

# The attribute of a replaced layer that holds its index among the layers with a state.
ATTRIBUTE = "state_layer"
# The children of such a layer: projections around a depthwise convolution.
_PARTS = {"in_proj": nn.Linear, "conv": nn.Conv1d, "out_proj": nn.Linear}

_TRIAL_ROWS = (5, 1, 4)  # rows of consecutive chunks
# Tolerance of a trial, relative to the largest number: the summation order differs.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class ShortConvs:
    """Replaces the forward pass of a model's layers of short convolutions (LFM2). Nothing else changes.

        rows ── in_proj ──▶ gate | out | x      the inputs of the convolution are gate * x: they are the state
        out * convolution ── out_proj ──▶ rows

    Attention layers get the attribute `kv_layer`, their index among the attention layers: only these have K and V.

    Args:
        module: the model, on its device and in evaluation mode, before its linear layers are packed.

    Attributes:
        shape: the state of one sequence; None if no layer has one.

    Raises:
        UnsupportedModel: a layer looks known, but computes something else; or layers have states of different shapes.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._parts = [part for part in module.modules() if _is_known(part)]
        shapes = {_shape_of(part, len(self._parts)) for part in self._parts}
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"{type(module).__name__}: expected short convolutions of one size, got {sorted(map(str, shapes))}"
            )
        self.shape = next(iter(shapes), None)
        for index, part in enumerate(self._parts):
            _require_agreement(part)
            setattr(part, ATTRIBUTE, index)
        layers = {int(part.layer_idx) for part in self._parts}
        others: list[Any] = [part for part in module.modules() if layers and hasattr(part, "layer_idx")]
        for part in others:
            if part.layer_idx not in layers:
                part.kv_layer = part.layer_idx - sum(layer < part.layer_idx for layer in layers)
        self._replace()

    @contextlib.contextmanager
    def originals(self) -> Iterator[None]:
        """Restore transformers' own implementation of all layers, inside the `with` block."""
        for part in self._parts:
            del vars(part)["forward"]
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        for part in self._parts:
            vars(part)["forward"] = partial(_forward, part)


def _is_known(part: nn.Module) -> bool:
    children = dict(part.named_children())
    return hasattr(part, "layer_idx") and {name: type(each) for name, each in children.items()} == _PARTS


def _shape_of(part: Any, num_layers: int) -> StateShape:
    """Return the state of a model with such layers.

    Raises:
        UnsupportedModel: `convolve` does not support its convolution.
    """
    conv, num_channels = part.conv, part.out_proj.in_features
    num_inputs = conv.kernel_size[0] - 1
    expected = (num_channels, num_channels, num_channels, (num_inputs,), (1,), (1,), "zeros", 3 * num_channels)
    kind = (conv.in_channels, conv.out_channels, conv.groups, conv.padding, conv.stride, conv.dilation)
    if (*kind, conv.padding_mode, part.in_proj.out_features) != expected or num_inputs < 1:
        raise UnsupportedModel(
            f"{type(part).__name__}: expected a causal depthwise convolution of {num_channels} channels, got "
            f"{conv} after {part.in_proj}"
        )
    return StateShape(num_layers, num_inputs, num_channels, conv.weight.dtype)


def _forward(
    part: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Compute rows `[1, num_rows, hidden_size]` of a layer with the step of the running forward pass."""
    name = type(part).__name__
    step = part.running_pass.step
    if step is None:
        raise UnsupportedModel(f"{name}: expected to convolve in a forward pass over the cache, got none")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name}: expected no attention mask, got one")
    gate, out, inputs = part.in_proj(hidden_states).chunk(3, dim=-1)
    convolved = step.convolve(getattr(part, ATTRIBUTE), (gate * inputs)[0], part.conv.weight[:, 0], part.conv.bias)
    rows: torch.Tensor = part.out_proj(out * convolved[None])
    return rows


@torch.inference_mode()
def _require_agreement(part: Any) -> None:
    """Check that a layer's own forward pass gives the same rows as the replacement, in one step and in chunks.

    Raises:
        UnsupportedModel: they differ.
    """
    weight = part.conv.weight
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(_TRIAL_ROWS)
    rows = torch.randn(1, num_rows, part.in_proj.in_features, generator=generator).to(weight)
    own = type(part).forward(part, rows)
    pool = StatePool(1, _shape_of(part, 1), weight.device)
    for chunks in ((num_rows,), _TRIAL_ROWS):
        source, parts, start = pool.start, [], 0
        for length in chunks:
            piece, start = rows[:, start : start + length], start + length
            layout = StateRows.build([0, length], [source], [(0, length, 0)], pool.shape.num_inputs).to(weight.device)
            step = StateStep(pool, layout)
            gate, out, inputs = part.in_proj(piece).chunk(3, dim=-1)
            convolved = step.convolve(0, (gate * inputs)[0], weight[:, 0], part.conv.bias)
            parts.append(part.out_proj(out * convolved[None]))
            step.keep()
            source = 0
        ours = torch.cat(parts, 1)
        if own.shape != ours.shape or not (own - ours).abs().max() <= _TOLERANCE[weight.dtype] * own.abs().max():
            raise UnsupportedModel(
                f"{type(part).__name__}: expected a short convolution between two projections, got a layer that "
                "computes something else"
            )
