"""Makes layers of short convolutions keep their states in the pool instead of in a cache of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from radixkv.errors import UnsupportedModel
from radixkv.model.layers.replaced_parts import ReplacedMethods, is_close
from radixkv.model.states.state_step import StateRows, StateStep
from radixkv.storage.state_pool import StatePool, StateShape

# The attribute of a replaced layer that holds its index among the layers with a state.
ATTRIBUTE = "state_layer"
# The types of the children of such a layer: projections around a depthwise convolution.
_CHILD_TYPES = {"in_proj": nn.Linear, "conv": nn.Conv1d, "out_proj": nn.Linear}

_TRIAL_ROWS = (5, 1, 4)  # rows of consecutive chunks


class ShortConvs(ReplacedMethods):
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
        layers: list[Any] = [part for part in module.modules() if _is_short_conv(part)]
        shapes = {_shape_of(layer, len(layers)) for layer in layers}
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"{type(module).__name__}: expected short convolutions of one size, got {sorted(map(str, shapes))}"
            )
        self.shape = next(iter(shapes), None)
        for state_layer, layer in enumerate(layers):
            _require_agreement(layer)
            setattr(layer, ATTRIBUTE, state_layer)
        if layers:
            _number_attention_layers(module, {int(layer.layer_idx) for layer in layers})
        super().__init__("forward", {layer: partial(_forward, layer) for layer in layers})


def _number_attention_layers(module: nn.Module, state_indices: set[int]) -> None:
    """Set `kv_layer` of all layers whose `layer_idx` is not in `state_indices`."""
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "layer_idx")]
    for layer in layers:
        if layer.layer_idx not in state_indices:
            layer.kv_layer = layer.layer_idx - sum(index < layer.layer_idx for index in state_indices)


def _is_short_conv(part: nn.Module) -> bool:
    children = dict(part.named_children())
    return hasattr(part, "layer_idx") and {name: type(child) for name, child in children.items()} == _CHILD_TYPES


def _shape_of(layer: Any, num_layers: int) -> StateShape:
    """Return the shape of the state of a sequence in a model with `num_layers` such layers.

    Raises:
        UnsupportedModel: `StateStep.convolve` does not support the convolution of the layer.
    """
    conv, num_channels = layer.conv, layer.out_proj.in_features
    num_inputs = conv.kernel_size[0] - 1
    is_supported = (
        conv.in_channels == conv.out_channels == conv.groups == num_channels
        and conv.padding == (num_inputs,)
        and conv.stride == conv.dilation == (1,)
        and conv.padding_mode == "zeros"
        and layer.in_proj.out_features == 3 * num_channels
        and num_inputs >= 1
    )
    if not is_supported:
        raise UnsupportedModel(
            f"{type(layer).__name__}: expected a causal depthwise convolution of {num_channels} channels, got "
            f"{conv} after {layer.in_proj}"
        )
    return StateShape(num_layers, num_inputs, num_channels, conv.weight.dtype)


def _forward(
    layer: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Compute rows `[1, num_rows, hidden_size]` of a layer with the step of the running forward pass."""
    name = type(layer).__name__
    step = layer.running_pass.step
    if step is None:
        raise UnsupportedModel(f"{name}: expected to convolve in a forward pass over the cache, got none")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name}: expected no attention mask, got one")
    gate, out, x = layer.in_proj(hidden_states).chunk(3, dim=-1)
    convolved = step.convolve(getattr(layer, ATTRIBUTE), (gate * x)[0], layer.conv.weight[:, 0], layer.conv.bias)
    rows: torch.Tensor = layer.out_proj(out * convolved[None])
    return rows


@torch.inference_mode()
def _require_agreement(layer: Any) -> None:
    """Check that a layer's own forward pass gives the same rows as the replacement, in one step and in chunks.

    Raises:
        UnsupportedModel: the rows differ.
    """
    weight = layer.conv.weight
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(_TRIAL_ROWS)
    rows = torch.randn(1, num_rows, layer.in_proj.in_features, generator=generator).to(weight)
    expected = type(layer).forward(layer, rows)
    pool = StatePool(1, _shape_of(layer, 1), weight.device)
    for chunk_lengths in ((num_rows,), _TRIAL_ROWS):
        outputs = []
        source, start = pool.start, 0
        for length in chunk_lengths:
            chunk = rows[:, start : start + length]
            # The state after all rows of this chunk is written to slot 0, from which the next chunk reads it.
            state_rows = StateRows.build([0, length], [source], [(0, length, 0)], pool.shape.num_inputs)
            step = StateStep(pool, state_rows.to(weight.device))
            gate, out, x = layer.in_proj(chunk).chunk(3, dim=-1)
            convolved = step.convolve(0, (gate * x)[0], weight[:, 0], layer.conv.bias)
            outputs.append(layer.out_proj(out * convolved[None]))
            step.keep()
            source, start = 0, start + length
        if not is_close(expected, torch.cat(outputs, 1)):
            raise UnsupportedModel(
                f"{type(layer).__name__}: expected a short convolution between two projections, got a layer that "
                "computes something else"
            )
