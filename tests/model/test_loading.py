import json
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    NemotronConfig,
)

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.model.loading import load_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8


def small(config_class: type, **extra: object) -> object:
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return config_class(**{**shape, **extra})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2), "ignore the cache"),
        (small(MambaConfig), "ignore the cache"),
        (small(GptOssConfig, num_key_value_heads=2, head_dim=16, num_local_experts=2), "passes `s_aux`"),
        (
            small(
                DeepseekV3Config,
                num_key_value_heads=2,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
                n_routed_experts=8,
                n_group=2,
                topk_group=1,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
            ),
            "one K/V shape",
        ),
        (small(NemotronConfig, num_key_value_heads=2), "NemotronAttention: .* do not pass them on"),
        (small(BertConfig), "BertSelfAttention: .* looks ahead"),
        (small(DogeConfig, num_key_value_heads=2), "DogeAttention: expected no attention mask"),
    ],
    ids=["bloom", "mamba", "gpt_oss", "deepseek_v3", "nemotron", "bert", "doge"],
)
def test_a_model_that_the_cache_can_not_serve_is_refused_by_name(config: object, reason: str, tmp_path: Path) -> None:
    write_checkpoint(config, tmp_path, max_shard_size="10MB")
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_a_hybrid_model_is_refused(tmp_path: Path) -> None:
    """Two of three layers are convolutions, whose state the cache would not hold."""
    config = small(
        Lfm2Config, num_hidden_layers=3, num_key_value_heads=1, layer_types=["conv", "full_attention", "conv"]
    )
    write_checkpoint(config, tmp_path, max_shard_size="10MB")
    with pytest.raises(UnsupportedModel, match="expected layers of full or sliding attention, got conv"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            small(
                Llama4TextConfig,
                intermediate_size_mlp=32,
                num_key_value_heads=1,
                head_dim=8,
                num_local_experts=2,
                attention_chunk_size=64,
            ),
            "chunked_attention",
        ),
        (
            small(Gemma3TextConfig, num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True),
            "use_bidirectional_attention|looks ahead",
        ),
    ],
    ids=["llama4", "gemma3 bidirectional"],
)
def test_a_mask_that_would_get_lost_is_refused(config: object, reason: str, tmp_path: Path) -> None:
    """Llama 4 attends in chunks; within the first chunk nobody would notice that ours does not."""
    write_checkpoint(config, tmp_path, max_shard_size="10MB")
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


class TestBadDirectories:
    def test_a_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model\.path: expected `tiny` or a directory"):
            load_model(ModelConfig(path=str(tmp_path / "nowhere"), device="cpu"))

    def test_a_config_that_is_not_json(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    def test_an_unknown_model_type(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path, max_shard_size="10MB")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
        with pytest.raises(ConfigError, match="no_such_model"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    def test_broken_safetensors(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path)
        shard = sorted(tmp_path.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:100])
        with pytest.raises(ConfigError, match="can't be loaded"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path)
        shard = sorted(tmp_path.glob("*.safetensors"))[0]
        shard.unlink()
        with pytest.raises(ConfigError, match=f"expected a directory with {shard.name}, got"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    def test_weights_of_another_shape(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
        with pytest.raises(ConfigError, match="do not fit"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    def test_weights_that_the_config_has_no_place_for(self, tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["llama"], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
        with pytest.raises(ConfigError, match="unexpected_keys"):
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))

    @pytest.mark.parametrize("wrong", [{"hidden_size": "x"}, {"num_key_value_heads": 0}])
    def test_a_config_of_nonsense_is_refused_in_one_line(self, wrong: dict[str, object], tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["qwen3"], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ConfigError, match="can't be loaded") as refused:
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))
        assert "\n" not in str(refused.value)

    def test_no_cuda_device(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(ConfigError, match=r"model\.device: expected a CUDA device"):
            load_model(ModelConfig(device="cuda"))


def test_int8_weights_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.loading._resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match=r'^model\.weights: expected "auto" on cuda, got "int8"'):
        load_model(ModelConfig(weights="int8"))


def test_int8_weights_are_refused_where_sums_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.loading.adds_integers_exactly", lambda: False)
    with pytest.raises(ConfigError, match=r'^model\.weights: expected "auto" on this processor, got "int8"'):
        load_model(ModelConfig(weights="int8", device="cpu"))


@needs_exact_int8
def test_int8_weights_make_another_model() -> None:
    own, rounded = (load_model(ModelConfig(weights=weights, device="cpu")) for weights in ("auto", "int8"))
    assert rounded.fingerprint != own.fingerprint
    assert rounded.num_parameters == own.num_parameters
    assert "model.layers.0.mlp.down_proj.weight" not in dict(rounded.module.named_parameters())


@pytest.mark.parametrize(("dtype", "num_warnings"), [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_float16_on_a_cpu_is_told_to_be_slow(dtype: str, num_warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    load_model(ModelConfig(dtype=dtype, device="cpu", exactness="fast"))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == num_warnings
    assert all("model.dtype=bfloat16" in warning for warning in warnings)
