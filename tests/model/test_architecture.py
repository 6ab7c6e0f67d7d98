from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    DeepseekV3ForCausalLM,
    DogeConfig,
    Gemma3TextConfig,
    PhimoeConfig,
    PretrainedConfig,
)

from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModel
from radixkv.model.architecture import check_architecture, check_windows
from radixkv.model.loading import load_model
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import SHAPE, write_checkpoint


def refusal(config: PretrainedConfig, directory: Path) -> str:
    """Write a checkpoint, and return the message with which loading it is refused."""
    write_checkpoint(config, directory, max_shard_size="10MB")
    with pytest.raises(UnsupportedModel) as refused:
        load_model(ModelConfig(path=str(directory), device="cpu"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "BloomForCausalLM: its attention does not use transformers' attention interface"),
        ("mamba", "MambaForCausalLM: keeps a per-sequence state in linear_attention layers"),
        (
            "deepseek_v32",
            "DeepseekV32ForCausalLM: expected full or sliding attention in each layer, got indexed_attention",
        ),
        ("llama4_text", "Llama4ForCausalLM: expected full or sliding attention in each layer, got chunked_attention"),
        ("hrm_text", "HrmTextForCausalLM: expected one attention call per layer and token"),
    ],
)
def test_a_kind_of_model_that_is_not_served_is_refused_by_name(model_type: str, reason: str, tmp_path: Path) -> None:
    assert refusal(small_config(model_type), tmp_path).startswith(reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(**SHAPE), "BertSelfAttention: expected causal attention, got attention that looks ahead"),
        (DogeConfig(**SHAPE), "DogeAttention: expected no attention mask"),
        (
            Gemma3TextConfig(**SHAPE, head_dim=16, use_bidirectional_attention=True),
            "Gemma3ForCausalLM: its config.json sets use_bidirectional_attention",
        ),
        (PhimoeConfig(**SHAPE, num_local_experts=4, sliding_window=24), "PhimoeForCausalLM: expected layers that pass"),
    ],
    ids=["bert", "doge", "gemma3 bidirectional", "phimoe with a window"],
)
def test_a_mask_that_would_be_ignored_is_rejected(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    assert refusal(config, tmp_path).startswith(reason)


@pytest.mark.parametrize(
    ("config", "windows", "is_lost"),
    [
        ({"sliding_window": 24}, [None], True),
        ({"sliding_window": 24}, [24, None], False),
        ({"sliding_window": None}, [None], False),
        ({}, [None], False),
        ({"sliding_window": 512}, [None], False),  # a window as long as the longest sequence hides nothing
        ({"sliding_window": 24, "layer_types": ["full_attention"]}, [None], False),
        ({"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}, [None], True),
    ],
)
def test_a_window_counts_as_lost_if_no_layer_passes_it_on(
    config: dict[str, object], windows: list[int | None], is_lost: bool
) -> None:
    def check() -> None:
        check_windows("Model", SimpleNamespace(**config), windows, max_tokens=512)

    if is_lost:
        with pytest.raises(UnsupportedModel, match="sets sliding_window to 24 for sequences of up to 512 tokens"):
            check()
    else:
        check()


def test_a_lost_window_is_refused_for_a_model_without_a_maximum_length() -> None:
    with pytest.raises(UnsupportedModel, match="sets sliding_window to 24 for sequences of any length"):
        check_windows("Model", SimpleNamespace(sliding_window=24), [None], max_tokens=None)


def test_latent_attention_is_refused_on_a_gpu_by_name() -> None:
    config = small_config("deepseek_v3")
    with pytest.raises(UnsupportedModel) as refused:
        check_architecture(DeepseekV3ForCausalLM, config, torch.device("cuda"))
    assert str(refused.value) == (
        "DeepseekV3ForCausalLM: latent attention (kv_lora_rank 16): expected model.device to be cpu, got cuda, where "
        "no kernel attends to latents yet"
    )
    check_architecture(DeepseekV3ForCausalLM, config, torch.device("cpu"))
