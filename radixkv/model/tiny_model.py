"""The embedded model: a small Llama with random weights, so that the service runs without a download."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_SEED = 0


def tiny_config() -> LlamaConfig:
    """Return four layers with 4 million parameters. Token ids 0 to 255 are bytes, the others are unused."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        initializer_range=0.08,  # wide enough that every token changes the answer
        tie_word_embeddings=False,
        eos_token_id=None,  # it was not trained to end
    )


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
