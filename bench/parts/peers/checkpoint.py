"""Saves the checkpoints that all engines run: a random Llama of 208 million parameters, and the embedded model.

python -m bench.parts.peers.checkpoint llama|tiny float32|bfloat16 DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from radixkv.model.tiny_model import build_tiny_model

_SEED = 0


def llama_config() -> LlamaConfig:
    """Return the shape of Qwen2 0.5B with half its layers and a vocabulary of 32,000: 208 million parameters."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=12,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,  # large enough that every token changes the output
    )


def build(name: str, dtype: str) -> LlamaForCausalLM:
    """Build a model. `llama` has the same weights in both dtypes, all of which bfloat16 can represent.

    Raises:
        ValueError: there is no such model.
    """
    if name == "tiny":
        return build_tiny_model("sdpa").to(getattr(torch, dtype))
    if name != "llama":
        raise ValueError(f"model: expected llama or tiny, got {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(llama_config()).to(torch.bfloat16).to(getattr(torch, dtype))


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of invented words. Prompts are token ids, but some engines do not start without a tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, vocab_size))]
    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def main(name: str, dtype: str, directory: str) -> None:
    """Save a model and its tokenizer."""
    model = build(name, dtype)
    model.save_pretrained(Path(directory))
    build_tokenizer(model.config.vocab_size).save_pretrained(Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
