"""Small random models, and GGUF files of them, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from radixkv.model.tiny_files import SPECIAL_TOKENS, _letters_of_bytes, merges
from radixkv.model_files.gguf_file import FLOAT_TYPES

VOCAB_SIZE = 512
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 511,
    "pad_token_id": 509,
    "initializer_range": 0.2,
}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 48, "query_pre_attn_scalar": 48, "sliding_window": 24}
# Kinds of models by name: the architecture in the file, the model type in transformers, and values that replace those
# of `_SIZES`.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-tied-with-biases": (
        "llama",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": (
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "llama-linear": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "mistral": ("llama", "mistral", {"sliding_window": None, "head_dim": 48}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2-yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", {**_GEMMA, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 30.0}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 40}),
    "phi3-partial": (
        "phi3",
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-longrope": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.01 * each for each in range(16)],
                "long_factor": [2.0 + 0.1 * each for each in range(16)],
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def random_model(kind: str, **options: Any) -> PreTrainedModel:
    """Return a random model of a kind in float32, with eager attention, and random weights in its norms, too.

    Args:
        kind: a name in `KINDS`.
        options: further values of the configuration.
    """
    _, model_type, differences = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **differences, **options})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 0.0 if name.endswith("bias") or model_type.startswith("gemma") else 1.0
                parameter.copy_(mean + 0.3 * torch.randn_like(parameter))
    return model


def vocabulary() -> dict[str, Any]:
    """Return the metadata of the embedded model's tokenizer."""
    pieces = [*_letters_of_bytes(), *("".join(pair).replace("_", "\u0120") for pair in merges()), *SPECIAL_TOKENS]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": pieces,
        "token_type": [3 if each in SPECIAL_TOKENS else 1 for each in pieces],
        "merges": [" ".join(pair).replace("_", "\u0120") for pair in merges()],
        "bos_token_id": 1,
        "eos_token_id": 511,
        "padding_token_id": 509,
        "add_bos_token": False,
    }


CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str,
    tensor_type: str = "F32",
    *,
    mixed: Mapping[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """Write a model to a file.

    Args:
        path: the file.
        model: made by `random_model`.
        kind: the kind of the model.
        tensor_type: type of matrices; other tensors are F32.
        mixed: the types of some matrices, by a part of their names, in place of `tensor_type`.
        metadata: further values by key, with two underscores in place of a dot; None leaves a value out.
    """
    architecture = KINDS[kind][0]
    writer = gguf.GGUFWriter(path, architecture)
    values = {**_hyperparameters(model, architecture)}
    values |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary().items()}
    values["tokenizer.chat_template"] = CHAT_TEMPLATE
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), model.config.num_hidden_layers
    )
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name not in tied:
            base, _, suffix = name.rpartition(".")
            gguf_name = f"{names.get_name(base)}.{suffix}"
            matching_types = [each for part, each in (mixed or {}).items() if part in gguf_name]
            own_type = matching_types[0] if matching_types else tensor_type
            add_tensor(writer, gguf_name, _convert(gguf_name, tensor, model, architecture).numpy(), own_type)
    for name, factors in _rope_factors(model).items():
        add_tensor(writer, name, factors, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, tensor_type: str) -> None:
    """Add a tensor, which is quantized if it is a matrix."""
    kind = gguf.GGMLQuantizationType[tensor_type if values.ndim > 1 else "F32"]
    if kind.name == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    elif kind.name == "F16":
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float16))
    else:
        assert kind.name == "BF16" or kind.name not in FLOAT_TYPES
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _hyperparameters(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = model.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) if architecture == "phi3" else None
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": rotated or (config.head_dim if architecture == "llama" else None),
    }
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[key] = getattr(config, key, None)
    if architecture in ("gemma2", "gemma3", "phi3"):
        values["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _convert(name: str, tensor: torch.Tensor, model: PreTrainedModel, architecture: str) -> torch.Tensor:
    """Return a tensor as llama.cpp stores it: norms of Gemma plus one, and queries and keys of Llama permuted."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture != "llama" or not any(each in name for each in (".attn_q.", ".attn_k.")):
        return tensor
    heads = model.config.num_attention_heads if ".attn_q." in name else model.config.num_key_value_heads
    # Llama.cpp rotates adjacent pairs of rows, transformers a row of the first half of a head with one of the second.
    other_dims = tensor.shape[1:]
    return tensor.reshape(heads, 2, -1, *other_dims).swapaxes(1, 2).reshape(-1, *other_dims)


def _rope_factors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{each}.weight": np.array(rope[f"{each}_factor"], np.float32) for each in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    # The factors by which scaling divides the frequencies.
    unscaled = 1 / rope["rope_theta"] ** (np.arange(0, model.config.head_dim, 2) / model.config.head_dim)
    return {"rope_freqs.weight": (unscaled / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: Mapping[type, Any] = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
        tuple: writer.add_array,
    }
    adders[type(value)](key, value)
