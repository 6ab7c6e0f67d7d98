import json
from pathlib import Path

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.loading import load_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8


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
        with pytest.raises(ConfigError, match=f"has no {shard.name}"):
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
    def test_an_invalid_config_is_rejected_in_one_line(self, wrong: dict[str, object], tmp_path: Path) -> None:
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


def test_int8_weights_are_rejected_on_machines_with_saturating_sums(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_float16_on_a_cpu_logs_that_it_is_slow(dtype: str, num_warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    load_model(ModelConfig(dtype=dtype, device="cpu", exactness="fast"))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == num_warnings
    assert all("model.dtype=bfloat16" in warning for warning in warnings)
