"""Refuses models whose attention or state the cache does not support, based on their class and config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from radixkv.errors import UnsupportedModel

# The states of short convolutions are supported; see `radixkv.model.states`.
_SHORT_CONV = "conv"

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", _SHORT_CONV})

# Types of layers that keep a state, in models whose class does not declare it.
_STATE_LAYERS = frozenset({"linear_attention"})

# Settings of config.json for masks that are neither causal nor a sliding window. The kernels would ignore them.
_OTHER_MASKS = ("attention_chunk_size", "use_bidirectional_attention")


def check_architecture(model_class: type[PreTrainedModel], config: Any, device: torch.device) -> None:
    """Refuse a model before its weights are read.

    Args:
        model_class: the class of transformers for the model.
        config: its configuration; only the part for text is read.
        device: device on which the model will run.

    Raises:
        UnsupportedModel: the cache or the device does not support its attention or its state.
    """
    text_config = config.get_text_config()
    name = model_class.__name__
    layer_types = {str(layer_type) for layer_type in getattr(text_config, "layer_types", None) or ()}
    unsupported_types = ", ".join(sorted(layer_types - _LAYER_TYPES))
    if model_class._is_stateful or layer_types & _STATE_LAYERS:
        layers = f" in {unsupported_types} layers" if unsupported_types else ""
        raise UnsupportedModel(f"{name}: keeps a per-sequence state{layers}, which the K/V cache does not store")
    if unsupported_types:
        raise UnsupportedModel(f"{name}: expected full or sliding attention in each layer, got {unsupported_types}")
    if _SHORT_CONV in layer_types and device.type != "cpu":
        raise UnsupportedModel(
            f"{name}: short convolutions (layers of {_SHORT_CONV}): expected model.device to be cpu, got {device}, "
            "where CUDA graphs do not keep their states yet"
        )
    rank = getattr(text_config, "kv_lora_rank", None)
    if rank and device.type != "cpu":
        raise UnsupportedModel(
            f"{name}: latent attention (kv_lora_rank {rank}): expected model.device to be cpu, got {device}, where no "
            "kernel attends to latents yet"
        )
    for key in _OTHER_MASKS:
        if getattr(text_config, key, None):
            raise UnsupportedModel(f"{name}: its config.json sets {key}, which the attention kernels do not support")
    if not (model_class.is_backend_compatible() and model_class._can_set_attn_implementation()):
        raise UnsupportedModel(
            f"{name}: its attention does not use transformers' attention interface, so it would bypass the K/V cache"
        )


def check_windows(name: str, config: Any, windows: Iterable[int | None], max_tokens: int | None) -> None:
    """Refuse a model that applies its sliding windows only in masks, which the attention kernels do not see.

    Args:
        name: name of the model, for the message.
        config: the configuration of its part for text.
        windows: windows that its layers pass to their attention; None for a layer without one.
        max_tokens: tokens of the longest sequence; None for no limit. A window of at least this size has no effect.

    Raises:
        UnsupportedModel: config.json states a window that has an effect, and no layer passes one.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    has_windowed_layers = layer_types is None or "sliding_attention" in layer_types
    if window and has_windowed_layers and not any(windows) and (max_tokens is None or window < max_tokens):
        lengths = "any length" if max_tokens is None else f"up to {max_tokens} tokens"
        raise UnsupportedModel(
            f"{name}: expected layers that pass their sliding window on, got none: its config.json sets sliding_window "
            f"to {window} for sequences of {lengths}"
        )
