import json
from pathlib import Path

import pytest

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS
from radixkv.kernels.cpu.int8_linear import Int8Weight
from radixkv.kernels.native.gemm import Format, QuantizedPanels
from radixkv.model.layers.packed_linear import Matmul
from radixkv.model.layers.quantized_embedding import QuantizedEmbedding
from radixkv.model.loading import load_model
from radixkv.model_files.gguf_file import GgufFile
from radixkv.planning.quantized_weights import gguf_weights_bytes, quantized_weights_bytes
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8, skip_without_kernels_for

MODELS = ["llama", "gpt2", "gpt_neox", "mixtral", "phi", "opt"]


def watch_matmuls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each matmul that is made from now on, without padding."""
    held: list[int] = []
    make = Matmul.__init__

    def watched(product: Matmul, *arguments: object) -> None:
        make(product, *arguments)  # type: ignore[arg-type]
        weight = product._packed
        if isinstance(weight, Int8Weight):
            held.append(weight.packed.numel() + weight.scales.nbytes + weight.zeros.nbytes)
        else:
            assert isinstance(weight, QuantizedPanels)
            num_panels, num_groups, group_bytes = weight.numbers.shape
            feature_bytes = {Format.Q8: 34, Format.Q4: 20}[weight.format]
            assert num_panels == -(-weight.out_features // (group_bytes // feature_bytes))
            held.append(weight.out_features * num_groups * feature_bytes)
        if product._bias is not None:
            held.append(product._bias.nbytes)

    monkeypatch.setattr(Matmul, "__init__", watched)
    return held


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(pytest.param(name, "int8", marks=needs_exact_int8) for name in MODELS),
        *((name, weights) for weights in QUANTIZED_BITS for name in MODELS),
    ],
)
def test_a_plan_counts_what_a_loaded_model_holds(
    tmp_path: Path, name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_kernels_for(weights)
    held = watch_matmuls(monkeypatch)
    directory = write_checkpoint(CONFIGS[name] if name in CONFIGS else small_config(name), tmp_path)
    model = load_model(ModelConfig(path=str(directory), device="cpu", exactness="fast", weights=weights))
    kept = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    assert quantized_weights_bytes(directory, weights) == sum(held) + sum(kept.values())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("mixed", [{}, {".attn_v.": "Q5_0", ".ffn_down.": "Q8_0"}])
def test_a_plan_counts_what_a_loaded_gguf_file_holds(
    tmp_path: Path, kind: str, mixed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tests.model_files.gguf_models import random_model, write_gguf

    skip_without_kernels_for("q4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    held = watch_matmuls(monkeypatch)
    path = write_gguf(tmp_path / "model.gguf", random_model(kind), kind, "Q4_0", mixed=mixed)
    model = load_model(ModelConfig(path=str(path), device="cpu", exactness="fast"))
    embedding = model.module.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    own = 0 if model.module.config.tie_word_embeddings else embedding._panels.numbers.nbytes
    kept = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    assert gguf_weights_bytes(GgufFile.read(path)) == sum(held) + own + sum(kept.values())


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
    assert quantized_weights_bytes(tmp_path, "int8") == expected


@pytest.mark.parametrize(
    ("names", "weights", "expected"),
    [
        ({"model.layers.0.mlp.up_proj.weight": (10, 64)}, "q8", 10 * 2 * 34),
        ({"model.layers.0.mlp.up_proj.weight": (10, 64)}, "q4", 10 * 2 * 20),
        ({"model.layers.0.mlp.up_proj.weight": (10, 20)}, "q4", 10 * 20 * 2),
        ({"model.embed_tokens.weight": (100, 64), "lm_head.weight": (100, 64)}, "q4", 100 * 64 * 2 + 100 * 2 * 34),
        ({"model.embed_tokens.weight": (100, 64)}, "q4", 100 * 64 * 2 + 100 * 2 * 34),
    ],
)
def test_groups_are_counted_and_the_head_has_8_bits(
    tmp_path: Path, names: dict[str, tuple[int, ...]], weights: str, expected: int
) -> None:
    write_file(tmp_path, {name: tensor(*shape) for name, shape in names.items()})
    assert quantized_weights_bytes(tmp_path, weights) == expected


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
        quantized_weights_bytes(write_file(tmp_path, tensors, length), "q8")  # type: ignore[arg-type]


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a --model directory with safetensors for --weights q4"):
        quantized_weights_bytes(tmp_path, "q4")
