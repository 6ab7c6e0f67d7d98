"""config.json and generation_config.json from the metadata of a GGUF file.

transformers can also read GGUF files, but it silently ignores hyperparameters that are not in its table, such as RoPE
scaling, and then computes another model. Here, a file with an unknown hyperparameter is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.model_files.gguf_file import GgufFile

# Model type and class of transformers by architecture. Mistral's models also have the architecture llama.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
# RoPE factors that files store as tensors; they become a part of config.json.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LONGROPE_TENSORS = {"rope_factors_long.weight", "rope_factors_short.weight"}
# Tokens that end a turn, as in llama.cpp. The metadata of some files only names the token that ends a document.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
_CONTROL = 3  # value in tokenizer.ggml.token_type

# Entries of config.json by their keys in the metadata, which follow the architecture: `llama.context_length`.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that are read below, or have no effect.
_OTHER_KEYS = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
# Further keys of an architecture that are read below.
_OWN_KEYS = {
    "gemma2": {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"},
    "phi3": {"attention.sliding_window"},
}
# Keys that have no effect if they have these values.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "pooling_type": 0}
# Gemma's largest models scale queries by hidden size / heads instead of the head size. Files do not contain the scale.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_MAX_LAYERS, _MAX_HEAD_DIM = 1000, 4096  # no known model reaches these numbers, but a damaged file may state more
_GEMMA3_PERIOD = 6  # one layer of six has full attention
# RoPE scaling of Llama 3.1 and later. Files contain only the resulting factors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the entries of config.json.

    Raises:
        UnsupportedModel: the architecture or a hyperparameter is not supported.
        ConfigError: a hyperparameter is missing or has another type.
    """
    return _Metadata(file).config()


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the entries of generation_config.json: BOS, padding, and all tokens that end a generation."""
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding")}
    return {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": list(_end_token_ids(file))}


def _end_token_ids(file: GgufFile) -> Iterator[int]:
    metadata = file.metadata
    named_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, token_types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    ids_by_text: list[int] = []
    if isinstance(tokens, tuple) and isinstance(token_types, tuple):
        ids_by_text = [
            token_id
            for token_id, (token, token_type) in enumerate(zip(tokens, token_types, strict=False))
            if token_type == _CONTROL and token in _TURN_ENDS
        ]
    yield from dict.fromkeys(token_id for token_id in (*named_ids, *ids_by_text) if isinstance(token_id, int))


class _Metadata:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = file.architecture
        if self._architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{file.path}: a GGUF file of the architecture {self._architecture or 'none'}: supported are "
                f"{', '.join(ARCHITECTURES)}. Others are served from a directory of Hugging Face, if their type is "
                "supported there"
            )
        self._prefix = f"{self._architecture}."

    def config(self) -> dict[str, Any]:
        self._require_known_keys()

        model_type, class_name = ARCHITECTURES[self._architecture]
        config: dict[str, Any] = {"architectures": [class_name], "model_type": model_type}
        config |= {name: self._positive(key) for key, name in _KEYS.items()}
        if config["num_hidden_layers"] > _MAX_LAYERS:
            raise self._unsupported("block_count", config["num_hidden_layers"], f"at most {_MAX_LAYERS}")

        num_heads = config["num_attention_heads"]
        head_dim = self._value("attention.key_length", int, config["hidden_size"] // num_heads)
        if not 0 < head_dim <= _MAX_HEAD_DIM:
            raise self._unsupported("attention.key_length", head_dim, f"1 to {_MAX_HEAD_DIM}")
        if (value_dim := self._value("attention.value_length", int, head_dim)) != head_dim:
            raise self._unsupported("attention.value_length", value_dim, f"{head_dim}, as for keys")

        embeddings = self._file.tensors.get("token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise ConfigError(f"{self._file.path}: expected a matrix token_embd.weight, got none")
        config |= {
            "head_dim": head_dim,
            "num_key_value_heads": self._value("attention.head_count_kv", int, num_heads),
            "vocab_size": embeddings.shape[0],
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": self._file.dtype,
            **generation_config(self._file),
        }

        # The method that is named like the architecture returns further entries.
        own_entries: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"_{self._architecture}", _no_entries)
        config |= own_entries(config)
        rotary_dim = self._value("rope.dimension_count", int, head_dim)
        if self._architecture == "phi3":
            config["partial_rotary_factor"] = rotary_dim / head_dim
        elif rotary_dim != head_dim:
            raise self._unsupported("rope.dimension_count", rotary_dim, f"{head_dim}, the size of a head")
        config["rope_parameters"] = self._rope(config)
        return config

    def _llama(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._file.tensors,
        }

    def _gemma2(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._gemma(config),
            "attn_logit_softcapping": self._value("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": self._value("final_logit_softcapping", float, 30.0),
            "layer_types": _layer_types(config, 2),
        }

    def _gemma3(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._gemma(config),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self._value("final_logit_softcapping", float, None),
            "layer_types": _layer_types(config, _GEMMA3_PERIOD),
        }

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[self._architecture]
        hidden_size_per_head = config["hidden_size"] // config["num_attention_heads"]
        return {
            "sliding_window": self._positive("attention.sliding_window"),
            "query_pre_attn_scalar": hidden_size_per_head if is_largest else config["head_dim"],
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def _phi3(self, config: dict[str, Any]) -> dict[str, Any]:
        context_length = config["max_position_embeddings"]
        return {
            "sliding_window": self._value("attention.sliding_window", int, None) or None,
            "original_max_position_embeddings": self._value(
                "rope.scaling.original_context_length", int, context_length
            ),
        }

    def _rope(self, config: dict[str, Any]) -> dict[str, Any]:
        is_gemma3 = self._architecture == "gemma3"
        theta = self._value("rope.freq_base", float, 1_000_000.0 if is_gemma3 else 10_000.0)
        if theta <= 1:
            raise self._unsupported("rope.freq_base", theta, "more than 1")
        rope = {"rope_theta": theta, **self._rope_scaling(config, theta)}
        if is_gemma3:
            local_theta = self._value("rope.freq_base_swa", float, 10_000.0)
            local = {"rope_type": "default", "rope_theta": local_theta}
            return {"full_attention": rope, "sliding_attention": local}
        if self._architecture == "phi3":
            rope["partial_rotary_factor"] = config["partial_rotary_factor"]
        return rope

    def _rope_scaling(self, config: dict[str, Any], theta: float) -> dict[str, Any]:
        factors = {name: self._read_numbers(name) for name in ROPE_TENSORS if name in self._file.tensors}
        kind = self._value("rope.scaling.type", str, "none")
        factor = self._value("rope.scaling.factor", float, self._value("rope.scale_linear", float, 1.0))
        original = self._value("rope.scaling.original_context_length", int, None)
        if factors.keys() == _LONGROPE_TENSORS and self._architecture == "phi3":
            return self._longrope(config, factors)
        if "rope_freqs.weight" in factors and self._architecture == "llama" and kind == "none":
            return self._llama3(config, theta, factors["rope_freqs.weight"])
        if factors:
            raise self._unsupported(next(iter(factors)), "a tensor", "RoPE without factors")
        if kind in ("none", "linear") and factor in (0.0, 1.0):
            return {"rope_type": "default"}
        if kind == "linear" or (kind == "none" and "rope.scaling.type" not in self):
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn" and original is not None:
            scale = self._value("rope.scaling.attn_factor", float, 1.0)
            if scale != 1.0:
                raise self._unsupported("rope.scaling.attn_factor", scale, "1.0")
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise self._unsupported("rope.scaling.type", kind, "none, linear, or yarn with its original_context_length")

    def _longrope(self, config: dict[str, Any], factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
        original, max_positions = config["original_max_position_embeddings"], config["max_position_embeddings"]
        if original <= 1:
            raise self._unsupported("rope.scaling.original_context_length", original, "more than 1")
        expected = 1.0  # the default of transformers, a factor of cosines and sines
        if max_positions > original:
            expected = math.sqrt(1 + math.log(max_positions / original) / math.log(original))
        scale = self._value("rope.scaling.attn_factor", float, expected)
        return {
            "rope_type": "longrope",
            "short_factor": list(factors["rope_factors_short.weight"]),
            "long_factor": list(factors["rope_factors_long.weight"]),
            "original_max_position_embeddings": original,
            "attention_factor": expected if math.isclose(scale, expected, rel_tol=1e-4) else scale,
        }

    def _llama3(self, config: dict[str, Any], theta: float, factors: tuple[float, ...]) -> dict[str, Any]:
        """Return Llama 3.1's RoPE parameters, after a check that they give the factors in the file."""
        if all(each == 1.0 for each in factors):
            return {"rope_type": "default"}
        rope = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
        expected = _llama3_factors(rope, theta, config["head_dim"])
        if len(expected) != len(factors) or not all(
            math.isclose(*pair, rel_tol=1e-3) for pair in zip(expected, factors, strict=True)
        ):
            raise self._unsupported("rope_freqs.weight", "other factors", "those of Llama 3.1")
        return rope

    def _require_known_keys(self) -> None:
        known = {*_KEYS, *_OTHER_KEYS, *_OWN_KEYS.get(self._architecture, ())}
        for key, value in self._file.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in known or (name in _NEUTRAL and value == _NEUTRAL[name]):
                continue
            raise self._unsupported(name, value, str(_NEUTRAL.get(name, "a file without it")))

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._file.metadata

    def _positive(self, key: str) -> Any:
        value = self._value(key, float if "epsilon" in key else int, None)
        if value is None or value <= 0:
            raise ConfigError(
                f"{self._file.path}: {self._prefix}{key}: expected a positive number, got "
                f"{'none' if value is None else value}"
            )
        return value

    def _value(self, key: str, kind: type, default: Any) -> Any:
        """Return a value. An array with one value per layer is accepted if all values are equal."""
        value = self._file.metadata.get(self._prefix + key, default)
        if isinstance(value, tuple) and value and set(value) == {value[0]}:
            value = value[0]
        if value is default:
            return value
        if isinstance(value, tuple):
            raise self._unsupported(key, "one for each layer", "the same for all layers")
        if kind is float:
            is_valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else:
            is_valid = isinstance(value, kind) and not isinstance(value, bool)
        if not is_valid:
            raise ConfigError(f"{self._file.path}: {self._prefix}{key}: expected {kind.__name__}, got {value!r}")
        return value

    def _read_numbers(self, name: str) -> tuple[float, ...]:
        """Read the data of a float32 tensor."""
        tensor = self._file.tensors[name]
        if tensor.type != "F32":
            raise self._unsupported(name, tensor.type, "F32")
        with open(self._file.path, "rb") as opened:
            opened.seek(tensor.offset)
            return struct.unpack(f"<{tensor.num_bytes // 4}f", opened.read(tensor.num_bytes))

    def _unsupported(self, key: str, value: object, expected: str) -> UnsupportedModel:
        name = key if key in self._file.tensors else f"{self._prefix}{key}"
        return UnsupportedModel(f"{self._file.path}: {name}: expected {expected}, got {value}")


def _no_entries(config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _layer_types(config: Mapping[str, Any], period: int) -> list[str]:
    """Return the attention type of each layer: full attention in every `period`-th layer, otherwise sliding windows."""
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """Return the factors that files contain for this RoPE scaling: the divisor of each frequency."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        # How often the angle of this frequency turns in full within the original context.
        num_turns = original / (2 * math.pi * theta ** (index / head_dim))
        smooth = min(1.0, max(0.0, (num_turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
