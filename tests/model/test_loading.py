import json
import logging
from pathlib import Path

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS
from radixkv.kernels.quantized_weight import QuantizedWeight
from radixkv.model.loading import load_model
from radixkv.model.tiny_model import build_tiny_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8, skip_without_kernels_for


class TestBadDirectories:
    def test_a_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model\.path: expected `tiny`, a directory"):
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

    @pytest.mark.parametrize("invalid", [{"hidden_size": "x"}, {"num_key_value_heads": 0}])
    def test_an_invalid_config_is_rejected_in_one_line(self, invalid: dict[str, object], tmp_path: Path) -> None:
        write_checkpoint(CONFIGS["qwen3"], tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **invalid}))
        with pytest.raises(ConfigError, match="can't be loaded") as refused:
            load_model(ModelConfig(path=str(tmp_path), device="cpu"))
        assert "\n" not in str(refused.value)

    def test_no_cuda_device(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(ConfigError, match=r"model\.device: expected a CUDA device"):
            load_model(ModelConfig(device="cuda"))


@pytest.mark.parametrize("weights", ["int8", "q8", "q4"])
def test_quantized_weights_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    monkeypatch.setattr("radixkv.model.loading._resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match=rf'^model\.weights: expected "auto" on cuda, got "{weights}"'):
        load_model(ModelConfig(weights=weights))


def test_int8_weights_are_rejected_on_machines_with_saturating_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.loading.adds_integers_exactly", lambda: False)
    with pytest.raises(ConfigError, match=r'^model\.weights: expected "auto", "q8" or "q4" on this .*, got "int8"'):
        load_model(ModelConfig(weights="int8", device="cpu"))


def test_groups_of_weights_are_rejected_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.loading.native_library", lambda: None)
    with pytest.raises(ConfigError, match=r'^model\.weights: expected "auto" or "int8" without .* kernels, got "q4"'):
        load_model(ModelConfig(weights="q4", device="cpu"))


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=needs_exact_int8), "q8", "q4"])
def test_quantized_weights_make_another_model(weights: str) -> None:
    skip_without_kernels_for(weights)
    plain = load_model(ModelConfig(weights="auto", device="cpu"))
    quantized = load_model(ModelConfig(weights=weights, device="cpu"))
    assert quantized.fingerprint != plain.fingerprint
    assert quantized.num_parameters == plain.num_parameters
    assert "model.layers.0.mlp.down_proj.weight" not in dict(quantized.module.named_parameters())


@pytest.mark.parametrize(("weights", "max_difference"), [("q8", 0.02), ("q4", 0.3)])
def test_a_model_computes_with_its_dequantized_weights(weights: str, max_difference: float) -> None:
    skip_without_kernels_for(weights)
    tokens = torch.arange(40)[None] * 7 % 256
    model = load_model(ModelConfig(weights=weights, device="cpu", exactness="fast"))
    model.module.set_attn_implementation("eager")
    oracle = build_tiny_model("eager").eval()
    with torch.inference_mode():
        with model.unfused():
            got = model.module(input_ids=tokens, use_cache=False).logits
        original = oracle(input_ids=tokens, use_cache=False).logits
        head = oracle.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())  # the embedding is not quantized
        for layer in oracle.modules():
            if isinstance(layer, torch.nn.Linear):
                bits = 8 if layer is head else QUANTIZED_BITS[weights]
                layer.weight.copy_(QuantizedWeight.quantize(layer.weight, bits).dequantize())
        expected = oracle(input_ids=tokens, use_cache=False).logits
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert 1e-4 * original.norm() < (got - original).norm() < max_difference * original.norm()


@pytest.mark.parametrize(("dtype", "num_warnings"), [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_float16_on_a_cpu_logs_that_it_is_slow(dtype: str, num_warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    load_model(ModelConfig(dtype=dtype, device="cpu", exactness="fast"))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == num_warnings
    assert all("model.dtype=bfloat16" in warning for warning in warnings)


class TestFilesThatDisagree:
    """A warning is logged if a model is served in another way than its files state."""

    def load(self, directory: Path, caplog: pytest.LogCaptureFixture, **files: dict[str, object]) -> list[str]:
        """Write a checkpoint with fields added to its files, load it, and return the warnings of `loading`."""
        write_checkpoint(CONFIGS["llama"], directory, max_shard_size="10MB")
        for name, fields in files.items():
            file = directory / f"{name}.json"
            existing_fields = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps({**existing_fields, **fields}))
        with caplog.at_level(logging.WARNING):
            load_model(ModelConfig(path=str(directory), device="cpu"))
        return [each.getMessage() for each in caplog.records if each.name == "radixkv.model.loading"]

    @pytest.mark.parametrize(("length", "words"), [(256, "may be poor"), (2048, "require RoPE scaling")])
    def test_a_tokenizer_that_states_another_length(
        self, length: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (message,) = self.load(tmp_path, caplog, tokenizer_config={"model_max_length": length})
        assert f"model_max_length of {length} tokens, config.json 512: sequences of at most 512 tokens" in message
        assert words in message

    @pytest.mark.parametrize("length", [512, 10**30, 1e30, None, "512"])
    def test_a_tokenizer_that_states_the_same_length_or_none(
        self, length: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert not self.load(tmp_path, caplog, tokenizer_config={"model_max_length": length})

    def test_dynamic_rope_scaling(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        (message,) = self.load(tmp_path, caplog, config={"rope_parameters": rope})
        assert message.startswith(
            "sequences of at most 512 tokens are served, although config.json states 2048: dynamic"
        )

    def test_code_of_its_own_is_not_run(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        classes = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
        (message,) = self.load(tmp_path, caplog, config={"auto_map": classes})
        assert "auto_map) for the model_type llama" in message
        assert "served as the LlamaForCausalLM of transformers" in message
