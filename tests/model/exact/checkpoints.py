"""Small checkpoints with random weights, written to disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LagunaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 300

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with the usual 0.02, wrong attention would hardly change the logits
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "gemma2": Gemma2Config(**SHAPE, head_dim=32, sliding_window=24, query_pre_attn_scalar=32),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0),
}

# Layers with different numbers of query heads, among them two without a window.
LAGUNA = LagunaConfig(
    **SHAPE,
    head_dim=16,
    layer_types=["full_attention", "full_attention", "sliding_attention"],
    num_attention_heads_per_layer=[4, 8, 2],
    sliding_window=24,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=48,
)


def write_checkpoint(config: PretrainedConfig, directory: Path, *, max_shard_size: str = "100KB") -> Path:
    """Write config.json and (sharded) safetensors of a random model; returns the directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def load_eager(directory: Path) -> PreTrainedModel:
    """Load the oracle: transformers' own model with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", local_files_only=True).eval()
