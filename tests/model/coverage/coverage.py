"""Tries a small random checkpoint of a model type: served, or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup.model_check import check_model
from tests.model.coverage.agreement import BLOCK_SIZE, Agreement
from tests.model.coverage.small_configs import SGLANG, VLLM, small_config
from tests.model.exact.checkpoints import write_checkpoint


@dataclass(frozen=True, slots=True)
class Coverage:
    """Result of trying one model type.

    Attributes:
        model_type: as config.json names it.
        engines: which of vLLM and SGLang serve its class.
        attention: the kinds of attention of its layers, in words; empty if it is refused.
        refusal: why it is not served; None if it is.
    """

    model_type: str
    engines: tuple[str, ...]
    attention: str
    refusal: str | None


def cover(model_type: str, directory: Path) -> Coverage:
    """Write a checkpoint, load it in exact and in fast mode, and compare it with transformers' eager attention.

    Args:
        model_type: one of `covered_types`.
        directory: where the checkpoint is written; empty.

    Raises:
        AssertionError: it is served, and an answer is wrong.
        ConfigError: it can't be loaded for another reason than those that refusals name.
    """
    engines = engines_of(model_type)
    write_checkpoint(small_config(model_type), directory, max_shard_size="10MB")
    try:
        for exactness in ("fast", "exact"):
            model = load_model(ModelConfig(path=str(directory), device="cpu", exactness=exactness))
            check_model(model, TorchKernels(), BLOCK_SIZE)
            Agreement(model, directory).require()
    except UnsupportedModel as error:
        return Coverage(model_type, engines, "", str(error))
    return Coverage(model_type, engines, _describe_attention(model), None)


def engines_of(model_type: str) -> tuple[str, ...]:
    """Name the engines that serve a model type."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return tuple(name for name, served in (("vLLM", VLLM), ("SGLang", SGLANG)) if architecture in served)


def _describe_attention(model: Model) -> str:
    kinds = model.attention_kinds
    words = [
        ("full", any(kind.window is None for kind in kinds)),
        ("sliding", any(kind.window is not None for kind in kinds)),
        ("softcap", any(kind.softcap is not None for kind in kinds)),
        ("sinks", any(kind.has_sinks for kind in kinds)),
        ("latent", model.kv_shape.is_latent),
        ("experts", any("experts" in name.rpartition(".")[2] for name, _ in model.module.named_modules())),
        ("short convolutions", model.state_shape is not None),
    ]
    return ", ".join(word for word, is_there in words if is_there)
