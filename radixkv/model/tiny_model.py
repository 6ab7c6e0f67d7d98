"""The embedded model: a small Llama with random weights, so that the service runs without a download."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.model.tiny_files import CONFIG

_SEED = 0


def tiny_config() -> LlamaConfig:
    """Return four layers with 4 million parameters. Token ids 0 to 255 are bytes, others pieces of text."""
    return LlamaConfig(**CONFIG)


def build_tiny_model(attention: str) -> LlamaForCausalLM:
    """Make the model, with the same weights each time. It is not trained: its text means nothing.

    Args:
        attention: name of the attention implementation.
    """
    config = tiny_config()
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(config)
