"""Writes LoRA adapters with random weights, in the format of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from radixkv.model.adapters.adapter_files import adaptable_layers
from radixkv.model.tiny_model import build_tiny_model

RANK = 8
_ALPHA = 16


def write_adapters(model: str, folder: Path, num_adapters: int) -> list[str]:
    """Write adapters of all linear layers of a model.

    Args:
        model: `tiny` or a directory.
        folder: the folder in which a directory is created for each adapter.
        num_adapters: number of adapters, with different weights.

    Returns:
        Settings of a server that loads them as `bench-0`, `bench-1` and so on.
    """
    shapes = adaptable_layers(_build_module(model))
    settings = []
    for number in range(num_adapters):
        directory = folder / f"adapter-{number}"
        directory.mkdir()
        fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": _ALPHA, "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps(fields))
        generator = torch.Generator().manual_seed(number)
        weights = {}
        for name, shape in shapes.items():
            for side, size in (("A", (RANK, shape.in_features)), ("B", (shape.out_features, RANK))):
                weight = torch.randn(size, generator=generator) / shape.in_features**0.5
                weights[f"base_model.model.{name}.lora_{side}.weight"] = weight
        save_file(weights, directory / "adapter_model.safetensors")
        settings.append(f"adapters.bench-{number}.path={directory}")
    return settings


def _build_module(model: str) -> PreTrainedModel:
    """Build a model; unless it is `tiny`, on the meta device, where layers have names and shapes, but no weights."""
    if model == "tiny":
        return build_tiny_model("eager")
    with torch.device("meta"):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return module
