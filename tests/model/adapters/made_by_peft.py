"""Adapters with random weights, written to disk by peft, and peft's own forward pass over them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.model.exact.checkpoints import load_eager


def write_adapter(checkpoint: Path, directory: Path, seed: int = 0, **options: Any) -> Path:
    """Create an adapter, by default of all linear layers, and write it; returns the directory.

    Args:
        checkpoint: the base model.
        directory: to write to.
        seed: of the weights. Both factors are random: peft begins with zeros for one.
        options: fields of `LoraConfig`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that GPT-2 stores its weights transposed
        fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
        adapted = get_peft_model(load_eager(checkpoint), LoraConfig(**fields))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        adapted.save_pretrained(directory)
    return directory


def load_adapted(checkpoint: Path, directory: Path) -> PreTrainedModel:
    """Load the oracle: peft's adapter over transformers' own model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load_eager(checkpoint), directory).eval()
