import json
import random
import struct
from pathlib import Path

import pytest

from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.model_files.gguf_config import ARCHITECTURES, generation_config, model_config
from radixkv.model_files.gguf_file import GgufFile, GgufTensor
from radixkv.model_files.gguf_tokenizer import tokenizer_files

MATRIX = GgufTensor((1000, 64), "Q4_0", 0, 0)
VALUES = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.5,
}


def gguf_file(architecture="llama", tensors=("token_embd.weight",), tokenizer=(), **values):
    """Return the header of a file with `VALUES`, changed by `values`, whose keys have two underscores for a dot.

    None removes a value.
    """
    hyperparameters = {**VALUES, **({"attention.sliding_window": 512} if architecture.startswith("gemma") else {})}
    hyperparameters |= {name.replace("__", "."): value for name, value in values.items()}
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in hyperparameters.items() if value is not None}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in dict(tokenizer).items()}
    return GgufFile(Path("model.gguf"), metadata, dict.fromkeys(tensors, MATRIX))


def test_sizes_are_read():
    config = model_config(gguf_file())
    assert (
        config
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 1000,
            "rms_norm_eps": 0.5,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
        == config
    )
    assert not model_config(gguf_file(tensors=("token_embd.weight", "output.weight")))["tie_word_embeddings"]
    assert model_config(gguf_file(attention__head_count_kv=None))["num_key_value_heads"] == 4
    assert model_config(gguf_file(attention__head_count_kv=(2, 2)))["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("gemma2", {"block_count": 26}, {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0}),
        ("gemma2", {"block_count": 46, "attention.key_length": 48}, {"query_pre_attn_scalar": 16, "head_dim": 48}),
        ("gemma3", {"block_count": 62, "attention.key_length": 48}, {"query_pre_attn_scalar": 16}),
        ("gemma3", {"block_count": 34, "attention.key_length": 48}, {"query_pre_attn_scalar": 48}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("phi3", {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
    ],
)
def test_fields_are_derived_as_in_llama_cpp(architecture, values, expected):
    values = {key.replace(".", "__"): value for key, value in values.items()}
    if architecture != "phi3":
        values["attention__value_length"] = values.get("attention__key_length")
    config = model_config(gguf_file(architecture, **values))
    assert config | expected == config


def test_layers_of_gemma_alternate_between_sliding_and_full_attention():
    kinds = model_config(gguf_file("gemma3", block_count=13))["layer_types"]
    assert [index for index, each in enumerate(kinds) if each == "full_attention"] == [5, 11]
    assert (
        model_config(gguf_file("gemma2", block_count=4))["layer_types"] == ["sliding_attention", "full_attention"] * 2
    )


@pytest.mark.parametrize("architecture", ["mamba", "deepseek2", "llama4", "bert", ""])
def test_other_architectures_are_refused_by_name(architecture):
    with pytest.raises(
        UnsupportedModel, match=f"of the architecture {architecture or 'none'}: supported are llama, qwen2"
    ):
        model_config(gguf_file(architecture))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count: expected 0, got 8"),
        ({"attention__causal": False}, "llama.attention.causal: expected True, got False"),
        ({"attention__scale": 2.0}, "llama.attention.scale: expected a file without it, got 2.0"),
        ({"logit_scale": 2.0}, "llama.logit_scale: expected a file without it"),
        ({"attention__sliding_window": 4096}, "llama.attention.sliding_window: expected a file without it"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count: expected 16, the size of a head, got 8"),
        ({"attention__value_length": 8}, "llama.attention.value_length: expected 16, as for keys, got 8"),
        (
            {"attention__head_count_kv": (2, 1)},
            "attention.head_count_kv: expected the same for all layers, got one for",
        ),
        (
            {"rope__scaling__type": "su"},
            "llama.rope.scaling.type: expected none, linear, or yarn with its original_con",
        ),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "expected none, linear, or yarn with its orig"),
    ],
)
def test_hyperparameters_that_are_not_served_are_refused_by_name(values, message):
    with pytest.raises(UnsupportedModel, match=message):
        model_config(gguf_file(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_count": None}, "llama.block_count: expected a positive number, got none"),
        ({"embedding_length": 0}, "llama.embedding_length: expected a positive number, got 0"),
        ({"block_count": "2"}, "llama.block_count: expected int, got '2'"),
        ({"block_count": 2**31}, "llama.block_count: expected at most 1000, got 2147483648"),
        ({"attention__head_count": 128}, "llama.attention.key_length: expected 1 to 4096, got 0"),
        ({"rope__freq_base": 0.0}, "llama.rope.freq_base: expected more than 1, got 0.0"),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base: expected float, got nan"),
        ({"tensors": ()}, "expected a matrix token_embd.weight, got none"),
    ],
)
def test_damaged_hyperparameters_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        model_config(gguf_file(**values))


def test_neutral_values_are_accepted():
    config = model_config(
        gguf_file(expert_count=0, attention__causal=True, rope__scaling__type="none", vocab_size=1000)
    )
    assert config["rope_parameters"]["rope_type"] == "default"


def test_every_token_that_ends_a_turn_ends_a_generation():
    tokens = ("<s>", "</s>", "<|im_end|>", "word", "<end_of_turn>", "<|eot_id|>")
    tokenizer = {"tokens": tokens, "token_type": (3, 3, 3, 1, 3, 1), "eos_token_id": 1, "bos_token_id": 0}
    assert generation_config(gguf_file(tokenizer=tokenizer)) == {
        "bos_token_id": 0,
        "pad_token_id": None,
        "eos_token_id": [1, 2, 4],
    }, "a normal token with the text of an end token does not end a generation"
    tokenizer = {"tokens": (), "eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 7}
    assert generation_config(gguf_file(tokenizer=tokenizer))["eos_token_id"] == [7, 9]


def test_every_architecture_has_a_class_of_transformers():
    transformers = pytest.importorskip("transformers")
    for model_type, name in ARCHITECTURES.values():
        assert getattr(transformers, name).config_class.model_type in (model_type, model_type.removesuffix("_text"))


def test_every_header_is_read_or_refused():
    """The headers have values of wrong types and sizes for random keys of every architecture."""
    rng = random.Random(3)
    odd_values = (0, 1, -1, 2**40, 0.0, -2.5, float("nan"), float("inf"), True, "x", "", (), (1, 2), ("a",), (3, 3, 3))
    keys = [*VALUES, "attention.key_length", "attention.value_length", "attention.sliding_window", "rope.freq_base"]
    keys += ["rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "final_logit_softcapping"]
    keys += ["rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scale_linear", "other"]
    tokenizer = ("tokens", "token_type", "eos_token_id", "eot_token_id", "model", "pre", "merges", "scores")
    outcomes = set()
    for _ in range(4000):
        architecture = rng.choice([*ARCHITECTURES])
        changed = {key.replace(".", "__"): rng.choice(odd_values) for key in rng.sample(keys, rng.choice((0, 1, 2)))}
        given = gguf_file(
            architecture, tokenizer={key: rng.choice(odd_values) for key in rng.sample(tokenizer, 2)}, **changed
        )
        try:
            json.dumps([model_config(given), generation_config(given)])
            tokenizer_files(given)
            outcomes.add("read")
        except ConfigError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("architecture", "tensors", "outcome"),
    [
        ("llama", {"rope_freqs": (1.0,) * 8}, "default"),
        (
            "llama",
            {"rope_freqs": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8.0)},
            "gguf: rope_freqs.weight: expected those of Ll",
        ),
        (
            "llama",
            {"rope_freqs": (1.0,) * 7 + (float("nan"),)},
            "rope_freqs.weight: expected those of Llama 3.1, got o",
        ),
        ("llama", {"rope_freqs": (1.0, 8.0)}, "rope_freqs.weight: expected those of Llama 3.1, got other factors"),
        ("llama", {"rope_factors_long": (1.0,) * 8}, "rope_factors_long.weight: expected RoPE without factors"),
        ("qwen2", {"rope_freqs": (1.0,) * 8}, "gguf: rope_freqs.weight: expected RoPE without factors, got a tensor"),
        ("phi3", {"rope_factors_short": (1.0,) * 8}, "rope_factors_short.weight: expected RoPE without factors"),
        ("phi3", {"rope_factors_short": (1.0,) * 8, "rope_factors_long": (2.0,) * 8}, "longrope"),
    ],
)
def test_rope_factors_in_tensors_are_read_or_refused(tmp_path, architecture, tensors, outcome):
    given = gguf_file(architecture)
    (tmp_path / "model.gguf").write_bytes(b"".join(struct.pack(f"<{len(each)}f", *each) for each in tensors.values()))
    offset, entries = 0, dict(given.tensors)
    for name, values in tensors.items():
        entries[f"{name}.weight"] = GgufTensor((len(values),), "F32", offset, 4 * len(values))
        offset += 4 * len(values)
    given = GgufFile(tmp_path / "model.gguf", given.metadata, entries)
    if ":" in outcome:
        with pytest.raises(UnsupportedModel, match=outcome):
            model_config(given)
    else:
        assert model_config(given)["rope_parameters"]["rope_type"] == outcome
