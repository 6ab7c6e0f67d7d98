"""The embedded model: a small Llama, trained on English of the nineteenth and the seventeenth century."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.model.tiny_files import CONFIG
from radixkv.model.tiny_weights import load_weights, shipped_weights


def tiny_config() -> LlamaConfig:
    """Return four layers with 4 million parameters. Token ids 0 to 255 are bytes, others pieces of text."""
    return LlamaConfig(**CONFIG)


def build_tiny_model(attention: str) -> LlamaForCausalLM:
    """Make the model, float32, with the weights that come with the package. Reads no network.

    Args:
        attention: name of the attention implementation.

    Raises:
        ConfigError: the file of weights is missing or damaged.
    """
    weights = load_weights(shipped_weights())
    config = tiny_config()
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):  # drawn and replaced: the caller's next numbers stay the same
        module = LlamaForCausalLM(config)
    left_out = module.load_state_dict(weights, strict=False)
    assert not left_out.unexpected_keys
    assert set(left_out.missing_keys) == set(module._tied_weights_keys), "expected all weights but tied ones"
    return module
