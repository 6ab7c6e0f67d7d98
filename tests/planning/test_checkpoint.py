"""Checkpoints are read as `radixkv plan` needs them: the shape of their K/V, states, windows and weights."""

import json
from pathlib import Path

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.loading import load_model
from radixkv.planning.checkpoint import Checkpoint, read_checkpoint
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.kv_layout import HeadKV, KVFormat, LatentKV, MixedKV
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import write_checkpoint

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_3_0_6B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,  # 64 per head, but `head_dim` takes precedence
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
GEMMA_2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "layer_types": ["sliding_attention", "full_attention"] * 21,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "dtype": "float32",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "head_dim": 64,  # only newer files have this key; the value is that of `qk_rope_head_dim`
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
LFM2_1_2B = {
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def write_config(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def refusal_of(path):
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA_3_8B, Checkpoint(32, 32, 8, 128, dtype="bf16")),
        (QWEN_3_0_6B, Checkpoint(28, 16, 8, 128, dtype="bf16")),
        (GEMMA_2_9B, Checkpoint(42, 16, 8, 256, dtype="fp32", window=4096, num_windowed_layers=21)),
        (DEEPSEEK_V3, Checkpoint(61, 128, 128, 128, mla_rank=512, rope_dim=64, dtype="bf16")),
        # Each of the ten convolutions keeps its last two inputs in bf16.
        (LFM2_1_2B, Checkpoint(6, 32, 8, 64, dtype="bf16", state_bytes=10 * 2 * 2048 * 2)),
    ],
    ids=["llama", "qwen3", "gemma2", "deepseek", "lfm2"],
)
def test_a_config_is_read(tmp_path, fields, expected):
    assert read_checkpoint(write_config(tmp_path, fields)) == expected
    assert read_checkpoint(str(tmp_path / "config.json")) == expected


def test_the_state_has_the_size_that_the_model_allocates(tmp_path):
    """This config.json lists the kind of each layer in `layer_types`, where that of LFM2 1.2B has `full_attn_idxs`."""
    directory = write_checkpoint(small_config("lfm2"), tmp_path)
    model = load_model(ModelConfig(path=str(directory), device="cpu"))
    checkpoint = read_checkpoint(directory)
    assert model.state_shape is not None
    assert checkpoint.state_bytes == model.state_shape.slot_bytes
    assert checkpoint.num_layers == model.kv_shape.num_layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv_L_cache": 0}, "conv_L_cache: expected an integer of at least 1, got int 0"),
        ({"full_attn_idxs": [2, 16]}, "full_attn_idxs: expected a list of indices below 16, got list "),
        ({"full_attn_idxs": 2}, "full_attn_idxs: expected a list of indices below 16, got int 2"),
        ({"conv_L_cache": None, "layer_types": ["conv"]}, "layer_types: expected layers that all store the same K/V"),
    ],
)
def test_a_wrong_field_of_short_convolutions_is_named(tmp_path, change, words):
    message = refusal_of(write_config(tmp_path, LFM2_1_2B | change))
    assert message.startswith(f"{tmp_path / 'config.json'}: {words}")


def test_the_keys_of_gpt2_are_understood(tmp_path):
    write_config(tmp_path, {"n_layer": 12, "n_head": 12, "n_embd": 768})
    assert read_checkpoint(tmp_path) == Checkpoint(12, 12, 12, 64)


def test_without_kv_heads_every_query_head_has_one(tmp_path):
    write_config(tmp_path, LLAMA_3_8B | {"num_key_value_heads": None})
    assert read_checkpoint(tmp_path).num_kv_heads == 32


@pytest.mark.parametrize(("is_new", "num_kv_heads"), [(False, 1), (True, 8)], ids=["old", "new decoder architecture"])
def test_multi_query_of_falcon_means_one_kv_head_except_in_the_new_architecture(tmp_path, is_new, num_kv_heads):
    fields = {"multi_query": True, "new_decoder_architecture": is_new, "num_kv_heads": 8, "num_attention_heads": 64}
    assert read_checkpoint(write_config(tmp_path, fields)).num_kv_heads == num_kv_heads


def test_the_text_part_of_a_multimodal_model_is_read(tmp_path):
    text = {name: value for name, value in LLAMA_3_8B.items() if name != "torch_dtype"}
    write_config(tmp_path, {"hidden_size": 1, "torch_dtype": "float16", "text_config": text, "vision_config": {}})
    assert read_checkpoint(tmp_path) == Checkpoint(32, 32, 8, 128, dtype="fp16")


def test_missing_keys_are_unknown_values(tmp_path):
    write_config(tmp_path, {"text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "qk_rope_head_dim": 64}})
    assert read_checkpoint(tmp_path) == Checkpoint(num_layers=34)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bf16"),
        ({"dtype": "torch.float16"}, "fp16"),
        ({"torch_dtype": "float8_e4m3fn"}, None),
        ({"torch_dtype": 7}, None),
        ({"dtype": "float16", "text_config": {"dtype": "float32"}}, "fp32"),
    ],
)
def test_the_dtype_of_the_text_part_and_the_newer_key_take_precedence(tmp_path, fields, dtype):
    assert read_checkpoint(write_config(tmp_path, fields)).dtype == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers: expected an integer of at least 1, got str '32'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected an integer of at least 1, got int 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads: expected an integer of at least 1, got bool True"),
        ({"head_dim": 1.5}, "head_dim: expected an integer of at least 1, got float 1.5"),
        ({"kv_lora_rank": -1}, "kv_lora_rank: expected an integer of at least 1, got int -1"),
        (
            {"hidden_size": 4097},
            "hidden_size: expected a multiple of num_attention_heads 32 where there is no head_dim, got 4097",
        ),
        ({"text_config": []}, "text_config: expected an object, got list []"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected layers that all store the same K/V, got list "),
        ({"layer_types": 3}, "layer_types: expected layers that all store the same K/V, got int 3"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers: expected layers that all store the same K/V, got int 10"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, words):
    message = refusal_of(write_config(tmp_path, LLAMA_3_8B | change))
    assert message.startswith(f"{tmp_path / 'config.json'}: {words}")


def test_zero_shared_layers_are_accepted(tmp_path):
    assert read_checkpoint(write_config(tmp_path, LLAMA_3_8B | {"num_kv_shared_layers": 0})).num_layers == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "expected a JSON object"),
        (b"\xff", "expected a JSON object"),
        (b"[1]", "expected a JSON object, got list [1]"),
    ],
)
def test_a_file_that_is_no_object_is_refused(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    assert words in refusal_of(tmp_path)


@pytest.mark.parametrize("name", ["", "missing", "missing.json"])
def test_a_path_without_a_config_is_refused(tmp_path, name):
    message = refusal_of(tmp_path / name)
    assert message.startswith("model: expected a directory with a config.json, or such a file, got ")
    assert message.endswith("No such file or directory")


def test_the_size_of_the_weights_is_read_from_the_index(tmp_path):
    write_config(tmp_path, LLAMA_3_8B)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}}')
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"12345")
    assert read_checkpoint(tmp_path).weights_bytes == 16_060_522_496


@pytest.mark.parametrize(
    "metadata", ["{}", '{"total_size": "many"}', '{"total_size": NaN}', '{"total_size": Infinity}', "null"]
)
def test_without_a_size_in_the_index_the_files_are_counted(tmp_path, metadata):
    write_config(tmp_path, LLAMA_3_8B)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"metadata": {metadata}}}')
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"12345")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"678")
    assert read_checkpoint(tmp_path).weights_bytes == 8


def test_the_same_weights_in_another_format_count_once(tmp_path):
    write_config(tmp_path, LLAMA_3_8B)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "consolidated.safetensors").write_bytes(b"12345")
    assert read_checkpoint(tmp_path).weights_bytes == 5


def test_weight_files_with_another_name_are_counted(tmp_path):
    write_config(tmp_path, LLAMA_3_8B)
    (tmp_path / "weights.safetensors").write_bytes(b"12345")
    assert read_checkpoint(tmp_path).weights_bytes == 5


def test_without_weight_files_the_size_is_unknown(tmp_path):
    assert read_checkpoint(write_config(tmp_path, LLAMA_3_8B)).weights_bytes is None


def test_checkpoints_that_transformers_writes_are_read_as_they_are_loaded(tmp_path):
    pytest.importorskip("transformers")
    from radixkv.config import ModelConfig
    from radixkv.model.loading import load_model
    from tests.model.exact.checkpoints import CONFIGS, write_checkpoint

    for name, config in CONFIGS.items():
        directory = write_checkpoint(config, tmp_path / name)
        read = read_checkpoint(directory)
        layout = HeadKV(read.num_layers, read.num_kv_heads, read.head_dim, read.num_query_heads)
        model = load_model(ModelConfig(path=str(directory), device="cpu"))
        assert layout.token_bytes(KVFormat(read.dtype)) == model.kv_shape.token_bytes, name
        assert read.weights_bytes == model.num_parameters * model.kv_shape.dtype.itemsize, name


@pytest.mark.parametrize("model_type", ["gemma4_text", "mimo_v2_flash"])
def test_a_plan_of_two_shapes_counts_what_the_pools_of_the_model_take(tmp_path, model_type):
    write_checkpoint(small_config(model_type), tmp_path, max_shard_size="10MB")
    planned = read_checkpoint(tmp_path)
    num_full_layers = planned.num_layers - planned.sliding.num_layers
    layout = MixedKV(planned.sliding, HeadKV(num_full_layers, planned.num_kv_heads, planned.head_dim))
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu", exactness="fast"))
    assert planned.num_windowed_layers == planned.sliding.num_layers
    assert planned.num_windowed_layers == sum(window is not None for window in model.windows)
    assert layout.token_bytes(KVFormat("fp32")) == model.kv_shape.token_bytes


GEMMA_4_26B = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2816,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
}


def test_the_heads_of_sliding_layers_are_read_if_they_differ(tmp_path):
    read = read_checkpoint(write_config(tmp_path, GEMMA_4_26B))
    assert (read.num_kv_heads, read.head_dim, read.sliding) == (2, 512, HeadKV(25, 8, 256, 16))
    read = read_checkpoint(write_config(tmp_path, GEMMA_4_26B | {"attention_k_eq_v": False, "global_head_dim": 256}))
    assert (read.num_kv_heads, read.head_dim, read.sliding) == (8, 256, None)
    full_layers = range(5, 30, 6)
    overrides = {str(layer): {"head_dim": 512, "num_key_value_heads": 2} for layer in full_layers}
    read = read_checkpoint(write_config(tmp_path, GEMMA_4_26B | {"per_layer_config": overrides}))
    assert (read.num_kv_heads, read.head_dim, read.sliding) == (2, 512, HeadKV(25, 8, 256, 16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 30 kinds, got list "),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config: expected the same K/V in all layers of a"),
        ({"model_type": "other"}, "global_head_dim: expected layers that all store the same K/V, got int 512"),
    ],
)
def test_heads_that_differ_otherwise_are_refused(tmp_path, change, words):
    message = refusal_of(write_config(tmp_path, GEMMA_4_26B | change))
    assert message.startswith(f"{tmp_path / 'config.json'}: {words}")


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_plan_of_latents_counts_what_the_pool_of_the_model_takes(tmp_path, model_type, kv_dtype):
    write_checkpoint(small_config(model_type), tmp_path, max_shard_size="10MB")
    planned = read_checkpoint(tmp_path)
    layout = LatentKV(planned.num_layers, planned.mla_rank, planned.rope_dim)
    shape = load_model(ModelConfig(path=str(tmp_path), device="cpu", exactness="fast")).kv_shape.stored_as(kv_dtype)
    storage = KVStorage(3, 16, shape, torch.device("cpu"))
    num_layers = 4 if model_type == "longcat_flash" else 3  # each of its two layers attends twice
    assert storage.block_bytes == storage.pool.blocks.nbytes // 3 == 16 * layout.token_bytes(shape.format)
    # A latent has 16 numbers and its rotary key 8: 4 bytes each in float32, or 1 byte each and a scale of 4 bytes.
    latent_bytes = (16 + 8) * 4 if kv_dtype == "auto" else 16 + 8 + 4
    assert storage.block_bytes == 16 * num_layers * latent_bytes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, (4096, 32)),
        ({"model_type": "mistral", "sliding_window": None}, (None, 0)),
        ({"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 4096}, (None, 0)),
        ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 512}, (512, 5)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (None, 0)),
    ],
)
def test_windowed_layers_are_counted_if_the_config_says_which_they_are(
    tmp_path: Path, fields: dict[str, object], expected: tuple[int | None, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 32, **fields}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.window, checkpoint.num_windowed_layers) == expected


def test_a_path_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match=r"^model: expected a directory with a config\.json, or such a file, got nnn"):
        read_checkpoint(5000 * "n")


def test_a_gguf_file_and_a_model_of_the_hub_are_read(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from radixkv.model_files.gguf_file import GgufFile
    from radixkv.planning.quantized_weights import gguf_weights_bytes
    from tests.model_files.gguf_models import random_model, write_gguf
    from tests.model_files.test_model_location import write_snapshot

    model = random_model("qwen3")
    read = read_checkpoint(write_gguf(tmp_path / "model.gguf", model, "qwen3", "Q8_0"))
    assert (read.num_layers, read.num_query_heads, read.num_kv_heads, read.head_dim) == (3, 4, 2, 48)
    assert (read.dtype, read.weights_bytes, read.limit.max_tokens) == (
        "bf16",
        gguf_weights_bytes(GgufFile.read(tmp_path / "model.gguf")),
        512,
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write_snapshot(tmp_path, "org/model", {"config.json": json.dumps(LLAMA_3_8B).encode()})
    assert read_checkpoint("org/model").num_layers == 32
    with pytest.raises(ConfigError, match="to download it, hf download org/other"):
        read_checkpoint("org/other")
    with pytest.raises(ConfigError, match="which does not exist: download one"):
        read_checkpoint(tmp_path / "other.gguf")
