import json
from pathlib import Path

import pytest

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.int8_linear import Int8Weight
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.loading import load_model
from radixkv.planning.int8_weights import int8_weights_bytes
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8


@needs_exact_int8
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mixtral", "phi", "opt"])
def test_a_plan_counts_what_a_loaded_model_holds(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    make = Matmul.__init__

    def watched(product: Matmul, *arguments: object) -> None:
        make(product, *arguments)  # type: ignore[arg-type]
        weight = product._packed
        assert isinstance(weight, Int8Weight)
        held.append(weight.packed.numel() + weight.scales.nbytes + weight.zeros.nbytes)
        if product._bias is not None:
            held.append(product._bias.nbytes)

    monkeypatch.setattr(Matmul, "__init__", watched)
    directory = write_checkpoint(CONFIGS[name] if name in CONFIGS else small_config(name), tmp_path)
    model = load_model(ModelConfig(path=str(directory), device="cpu", exactness="fast", weights="int8"))
    kept = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    assert int8_weights_bytes(directory) == sum(held) + sum(kept.values())


def write_file(directory: Path, tensors: dict[str, object], length: int | None = None) -> Path:
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes((length or len(header)).to_bytes(8, "little") + header)
    return directory


def tensor(*shape: int) -> dict[str, object]:
    size = 2
    for length in shape:
        size *= length
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, size]}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"model.layers.0.self_attn.q_proj.weight": (10, 20)}, 10 * 20 + 10 * 8),
        ({"model.layers.0.mlp.c_fc.weight": (10, 20)}, 10 * 20 + 20 * 8),
        ({"model.layers.0.self_attn.q_proj.bias": (10,)}, 20),
        ({"model.norm.weight": (10,)}, 20),
        ({"model.embed_tokens.weight": (100, 20), "lm_head.weight": (100, 20)}, 4000 + 2000 + 800),
        ({"model.embed_tokens.weight": (100, 20)}, 4000 + 2000 + 800),
        ({"wte.weight": (100, 20), "wpe.weight": (30, 20)}, 4000 + 1200 + 2000 + 800),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": (10, 20)}, 400),
        ({"model.layers.0.mlp.gate.weight": (10, 20)}, 400),
        ({"model.layers.0.mlp.gate_proj.weight": (10, 20)}, 280),
    ],
)
def test_linear_layers_alone_are_rounded(tmp_path: Path, names: dict[str, tuple[int, ...]], expected: int) -> None:
    write_file(tmp_path, {"__metadata__": {"format": "pt"}, **{name: tensor(*shape) for name, shape in names.items()}})
    assert int8_weights_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("tensors", "length", "words"),
    [
        ({}, 2**60, "expected the header of safetensors"),
        ({}, 1, "expected the header of safetensors"),
        ([1], None, "expected the header of safetensors"),
        ({"a.weight": 7}, None, "a.weight: expected a shape and offsets, got int 7"),
        ({"a.weight": {"shape": [2, "x"], "data_offsets": [0, 4]}}, None, "a.weight: expected a shape and offsets"),
        ({"a.weight": {"shape": [2, -2], "data_offsets": [0, 4]}}, None, "a.weight: expected a shape and offsets"),
        ({"a.weight": {"shape": [2, 2], "data_offsets": [4]}}, None, "a.weight: expected a shape and offsets"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, tensors: object, length: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"model.safetensors: {words}"):
        int8_weights_bytes(write_file(tmp_path, tensors, length))  # type: ignore[arg-type]


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a --model directory with safetensors for --weights int8"):
        int8_weights_bytes(tmp_path)
