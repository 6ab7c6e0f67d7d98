"""Checkpoints are reproducible, and contain the same numbers in both dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.parts.peers import checkpoint
from radixkv.model.tiny_model import build_tiny_model


@pytest.fixture
def small_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model `llama` small."""
    config = checkpoint.llama_config()
    config.num_hidden_layers, config.vocab_size, config.intermediate_size = 1, 300, 64
    monkeypatch.setattr(checkpoint, "llama_config", lambda: config)


@pytest.mark.usefixtures("small_llama")
def test_both_dtypes_have_the_same_numbers() -> None:
    in_float32, in_bfloat16 = (checkpoint.build("llama", dtype).state_dict() for dtype in ("float32", "bfloat16"))
    for name, weight in in_float32.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, in_bfloat16[name].float())


def test_the_embedded_model_is_saved_as_it_is(tmp_path: Path) -> None:
    checkpoint.main("tiny", "float32", str(tmp_path))
    saved = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in build_tiny_model("sdpa").state_dict().items():
        assert torch.equal(weight, saved[name])
    assert (tmp_path / "tokenizer.json").exists()
