"""Loads the weights of a GGUF file into a model of transformers, dequantized."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from radixkv.errors import ConfigError
from radixkv.model_files.gguf_config import ROPE_TENSORS
from radixkv.model_files.gguf_file import FLOAT_TYPES, TENSOR_TYPES, GgufFile, GgufTensor

_log = logging.getLogger(__name__)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2**24  # numbers that are dequantized at once: in float32 they take 64 MiB


def load_gguf_weights(
    file: GgufFile, model_class: type[PreTrainedModel], config: Any, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Make a model with the weights of a file. Logs the types of its tensors, and the memory that they take.

    Args:
        file: the file.
        model_class: class of the model.
        config: configuration that `model_config` made of this file.
        dtype: of all weights.
        attention: name of the attention function.

    Raises:
        ConfigError: the file lacks a weight, has others as well, or has one of another shape.
    """
    names = _gguf_names(file, model_class, config)
    _require_same(file, names)
    data = np.memmap(file.path, np.uint8, "r")
    weights = {name: _weight(file, gguf_name, data, config, dtype) for name, gguf_name in names.items()}
    num_bytes = sum(each.nbytes for each in weights.values())
    module, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        attn_implementation=attention,
        dtype=dtype,
        output_loading_info=True,
    )
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    wrong = [f"{kind} {sorted(info[kind])[:3]}" for kind in kinds if info.get(kind)]
    if wrong:
        raise ConfigError(f"{file.path}: the weights do not fit the metadata: {', '.join(wrong)}")
    sizes = ", ".join(f"{each / 1e6:.1f} MB in {kind}" for kind, each in file.num_bytes_by_type.items())
    _log.info(
        "read a GGUF file with %s; its weights take %.1f MB in %s, since quantized ones are dequantized",
        sizes,
        num_bytes / 1e6,
        str(dtype).removeprefix("torch."),
    )
    return module


def _gguf_names(file: GgufFile, model_class: type[PreTrainedModel], config: Any) -> dict[str, str]:
    """Return the names in the file by those of transformers, for all weights of the model."""
    import gguf

    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[file.architecture], config.num_hidden_layers)
    with torch.device("meta"):
        empty = model_class(config)
    names = {}
    for name in empty.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        names[name] = f"{name_map.get_name(base)}.{suffix}"
    return names


def _require_same(file: GgufFile, names: dict[str, str]) -> None:
    """Refuse a file whose tensors are not exactly those of the model."""
    expected = set(names.values())
    found = set(file.tensors) - set(ROPE_TENSORS)
    for what, tensors in (("lacks", expected - found), ("also has", found - expected)):
        if tensors:
            few = ", ".join(sorted(tensors)[:3])
            raise ConfigError(
                f"{file.path}: expected the tensors of a {file.architecture} model, got a file that {what} "
                f"{len(tensors)} of them, such as {few}"
            )


def _weight(file: GgufFile, name: str, data: _Bytes, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as transformers has it."""
    tensor = file.tensors[name]
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        # llama.cpp adds 1, which must be taken away before the numbers are rounded.
        return (_values(tensor, data, torch.float32) - 1).to(dtype)
    weight = _values(tensor, data, dtype)
    if file.architecture == "llama" and ".attn_q." in name:
        return _unpermuted(weight, config.num_attention_heads)
    if file.architecture == "llama" and ".attn_k." in name:
        return _unpermuted(weight, config.num_key_value_heads)
    return weight


def _unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows in the order of transformers, whose RoPE rotates halves of a head; llama.cpp's rotates neighbors."""
    rest = weight.shape[1:]
    return weight.reshape(num_heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest)


def _values(tensor: GgufTensor, data: _Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a tensor in `dtype`."""
    values = torch.empty(tensor.shape, dtype=dtype)
    flat, end = values.view(-1), 0
    for piece in _pieces(tensor, data):
        flat[end : end + piece.numel()] = piece
        end += piece.numel()
    return values


def _pieces(tensor: GgufTensor, data: _Bytes) -> Iterator[torch.Tensor]:
    """Iterate over the numbers of a tensor, in whole blocks."""
    per_block, block_bytes = next((each[1:] for each in TENSOR_TYPES.values() if each[0] == tensor.type), (1, 1))
    blocks = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, block_bytes)
    step = max(1, _CHUNK // per_block)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        if tensor.type in FLOAT_TYPES:
            yield torch.from_numpy(np.array(piece)).view(-1).view(_FLOATS[tensor.type])
        else:
            yield torch.from_numpy(_dequantized(piece, tensor.type)).view(-1)


def _dequantized(blocks: _Bytes, kind: str) -> np.ndarray[Any, Any]:
    import gguf

    values: np.ndarray[Any, Any] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values)
