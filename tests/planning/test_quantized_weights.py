"""The planned bytes of quantized weights are those that a loaded model takes."""

import json
import math
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
from radixkv.model.model import Model
from radixkv.model_files.gguf_file import GgufFile
from radixkv.planning.quantized_weights import gguf_weights_bytes, quantized_weights_bytes
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.processor import needs_exact_int8, skip_without_kernels_for

MODELS = ["llama", "gpt2", "gpt_neox", "mixtral", "phi", "opt"]


def watch_matmuls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the bytes of each matmul that is created later are added, without padding."""
    matmul_bytes: list[int] = []
    initialize = Matmul.__init__

    def watched(matmul: Matmul, *arguments: object) -> None:
        initialize(matmul, *arguments)  # type: ignore[arg-type]
        weight = matmul._packed
        if isinstance(weight, Int8Weight):
            matmul_bytes.append(weight.packed.numel() + weight.scales.nbytes + weight.zeros.nbytes)
        else:
            assert isinstance(weight, QuantizedPanels)
            num_panels, num_groups, group_bytes = weight.numbers.shape
            # Per group of 32 weights and output feature: the weights and a scale; in Q4 also a minimum.
            feature_bytes = {Format.Q8: 34, Format.Q4: 20}[weight.format]
            assert num_panels == -(-weight.out_features // (group_bytes // feature_bytes))
            matmul_bytes.append(weight.out_features * num_groups * feature_bytes)
        if matmul._bias is not None:
            matmul_bytes.append(matmul._bias.nbytes)

    monkeypatch.setattr(Matmul, "__init__", watched)
    return matmul_bytes


def parameter_bytes(model: Model) -> int:
    """Return the bytes of the parameters of a model, tied ones once."""
    return sum({parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}.values())


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
    matmul_bytes = watch_matmuls(monkeypatch)
    directory = write_checkpoint(CONFIGS[name] if name in CONFIGS else small_config(name), tmp_path)
    model = load_model(ModelConfig(path=str(directory), device="cpu", exactness="fast", weights=weights))
    assert quantized_weights_bytes(directory, weights) == sum(matmul_bytes) + parameter_bytes(model)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("mixed", [{}, {".attn_v.": "Q5_0", ".ffn_down.": "Q8_0"}], ids=["one format", "mixed formats"])
def test_a_plan_counts_what_a_loaded_gguf_file_holds(
    tmp_path: Path, kind: str, mixed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tests.model_files.gguf_models import random_model, write_gguf

    skip_without_kernels_for("q4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matmul_bytes = watch_matmuls(monkeypatch)
    path = write_gguf(tmp_path / "model.gguf", random_model(kind), kind, "Q4_0", mixed=mixed)
    model = load_model(ModelConfig(path=str(path), device="cpu", exactness="fast"))
    embedding = model.module.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    # A tied embedding is the matmul of the head, which is counted already.
    embedding_bytes = 0 if model.module.config.tie_word_embeddings else embedding._panels.numbers.nbytes
    assert gguf_weights_bytes(GgufFile.read(path)) == sum(matmul_bytes) + embedding_bytes + parameter_bytes(model)


def write_header(directory: Path, tensors: dict[str, object], length: int | None = None) -> Path:
    """Write a safetensors file that consists of a header alone, which may state a wrong length of the header."""
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes((length or len(header)).to_bytes(8, "little") + header)
    return directory


def tensor(*shape: int) -> dict[str, object]:
    """Return the entry of a bfloat16 tensor in the header of a safetensors file."""
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 2 * math.prod(shape)]}


# A bfloat16 weight takes 2 bytes. An int8 weight takes 1 byte, and each output feature a scale and a zero point of 4
# bytes each. Without an `lm_head`, the embedding also counts as the int8 weight of the head.
@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"model.layers.0.self_attn.q_proj.weight": (10, 20)}, 10 * 20 + 10 * 8),
        ({"model.layers.0.mlp.c_fc.weight": (10, 20)}, 10 * 20 + 20 * 8),  # of GPT-2, with the input features first
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
def test_only_linear_layers_are_quantized(tmp_path: Path, shapes: dict[str, tuple[int, ...]], expected: int) -> None:
    tensors = {name: tensor(*shape) for name, shape in shapes.items()}
    write_header(tmp_path, {"__metadata__": {"format": "pt"}, **tensors})
    assert quantized_weights_bytes(tmp_path, "int8") == expected


# Per group of 32 weights of an output feature, q8 takes 34 bytes and q4 takes 20 bytes.
@pytest.mark.parametrize(
    ("shapes", "weights", "expected"),
    [
        ({"model.layers.0.mlp.up_proj.weight": (10, 64)}, "q8", 10 * 2 * 34),
        ({"model.layers.0.mlp.up_proj.weight": (10, 64)}, "q4", 10 * 2 * 20),
        ({"model.layers.0.mlp.up_proj.weight": (10, 20)}, "q4", 10 * 20 * 2),  # no whole groups
        ({"model.embed_tokens.weight": (100, 64), "lm_head.weight": (100, 64)}, "q4", 100 * 64 * 2 + 100 * 2 * 34),
        ({"model.embed_tokens.weight": (100, 64)}, "q4", 100 * 64 * 2 + 100 * 2 * 34),
    ],
)
def test_groups_are_counted_and_the_head_has_8_bits(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], weights: str, expected: int
) -> None:
    write_header(tmp_path, {name: tensor(*shape) for name, shape in shapes.items()})
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
def test_an_invalid_safetensors_file_is_refused_by_name(
    tmp_path: Path, tensors: object, length: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.safetensors: {words}"):
        quantized_weights_bytes(write_header(tmp_path, tensors, length), "q8")  # type: ignore[arg-type]


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a --model directory with safetensors for --weights q4"):
        quantized_weights_bytes(tmp_path, "q4")
