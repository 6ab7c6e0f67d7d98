"""Loads a model directory, or makes the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError, RadixKVError, UnsupportedModel
from radixkv.model.attention.paged_step import ATTENTION_NAME
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model

if TYPE_CHECKING:
    pass


def load_model(config: ModelConfig) -> Model:
    """Load a model directory (config.json and safetensors), or make the embedded one.

    Raises:
        ConfigError: the directory or a file in it can't be used.
        UnsupportedModel: the model would ignore the cache, or needs something that the kernels do not do.
    """
    device = _resolve_device(config.device)
    is_exact = config.exactness == "exact"
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if config.path == "tiny":
        tiny = build_tiny_model(ATTENTION_NAME).to(dtype or torch.float32)
        return Model("tiny", tiny, device, is_exact=is_exact)
    directory = Path(config.path)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: expected `tiny` or a directory with a config.json, got {config.path}")
    try:
        module = _load_directory(directory, dtype)
        _refuse_masks_we_do_not_make(module)
        return Model(directory.resolve().name, module, device, is_exact=is_exact)
    except RadixKVError:
        raise
    except Exception as error:  # whatever transformers raises over a bad directory
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path: {directory} can't be loaded: {type(error).__name__}: {reason}") from error


def _load_directory(directory: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    disable_progress_bar()  # a service's log is no terminal
    hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    model_class = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if model_class is None:
        raise UnsupportedModel(f"model_type {hf_config.model_type}: expected a causal language model")
    if not (model_class.is_backend_compatible() and model_class._can_set_attn_implementation()):
        raise UnsupportedModel(
            f"{model_class.__name__}: its attention does not go through transformers' attention interface, so it would "
            "ignore the cache"
        )
    module, info = AutoModelForCausalLM.from_pretrained(
        directory,
        config=hf_config,
        attn_implementation=ATTENTION_NAME,
        dtype=dtype or "auto",
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    wrong = [f"{kind} {sorted(info[kind])[:3]}" for kind in kinds if info.get(kind)]
    if wrong:
        raise ConfigError(f"model.path: the weights in {directory} do not fit its config.json: {', '.join(wrong)}")
    return module


def _refuse_masks_we_do_not_make(module: PreTrainedModel) -> None:
    """Our attention is causal, with or without a sliding window; other masks would get lost without a word."""
    config = module.config.get_text_config()
    name = type(module).__name__
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        kinds = ", ".join(sorted(others))
        raise UnsupportedModel(f"{name}: expected layers of full or sliding attention, got {kinds}")
    for key in ("attention_chunk_size", "use_bidirectional_attention"):
        if getattr(config, key, None):
            raise UnsupportedModel(f"{name}: its config.json sets {key}, which our attention does not do")


def _resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: expected a CUDA device for `cuda`, got none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
