"""Computes the size of a model's weights with quantized linear layers, from the headers of its files."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from radixkv.config.model_directory import shown
from radixkv.errors import ConfigError
from radixkv.model_files.gguf_file import FLOAT_TYPES, FOUR_BIT_TYPES, GgufFile, GgufTensor
from radixkv.storage.kv_layout import FORMAT_OF_DTYPE, KVFormat

_MAX_HEADER_BYTES = 100_000_000  # safetensors allows no more
_INT8_FEATURE_BYTES = 8  # an output feature has a scale and, for oneDNN, a zero point: 32 bits each
_GROUP_FEATURES = 32  # input features that share a scale, in q8 and q4
_GROUP_BYTES = {"q8": 2 + 32, "q4": 2 + 2 + 16}  # a scale, in q4 also a minimum, and the codes

# Names of embeddings, and of matrices of experts and their routers, which keep their dtype.
_EMBEDDING = re.compile(r"(^|\.)(embed_(tokens|in)|word_embeddings|tok_embeddings|wte)\.weight$")
_POSITIONS = re.compile(r"(^|\.)(embed_positions|position_embeddings|wpe)\.weight$")
_EXPERTS_AND_ROUTERS = re.compile(r"\.experts\.|\.(mlp|block_sparse_moe|feed_forward)\.gate\.|router\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_MERGED_PROJECTION = re.compile(r"(attn)_[qkv]\b|(ffn)_(?:gate|up)\b")  # in GGUF files
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc|q_attn)\.weight$")  # GPT-2's are [in_features, out_features]


def quantized_weights_bytes(path: str | Path, weights: str) -> int:
    """Return the bytes of a model's weights in a quantized format.

    Every matrix of a linear layer is quantized. In q8 and q4, matrices whose number of input features is not a multiple
    of 32 are an exception. Embeddings, norms and experts keep the dtype of the files. If the head and the embedding
    share a matrix, it is stored twice, quantized and in the dtype of the files. Layers are recognized by their names in
    transformers. Padding is not counted.

    Args:
        path: a directory with safetensors, or a file in it.
        weights: `q8`, `q4` or `int8`, as for `model.weights`.

    Raises:
        ConfigError: there are no safetensors, or a file cannot be read. The message names the directory or the file.
    """
    directory = Path(path) if Path(path).is_dir() else Path(path).parent
    files = weight_files(directory)
    if not files:
        raise ConfigError(
            f"plan: expected a --model directory with safetensors for --weights {weights}, got {directory}"
        )
    head_weights = "q8" if weights == "q4" else weights
    total = 0
    embedding: tuple[list[int], int] | None = None  # shape, bytes
    has_head = False
    for file in files:
        for name, tensor in _read_header(file).items():
            shape, num_bytes = _sizes(file, name, tensor)
            if _is_quantized(name, shape):
                is_head = _HEAD.search(name) is not None
                has_head |= is_head
                shape = shape[::-1] if _TRANSPOSED.search(name) else shape
                total += _quantized_bytes(shape, num_bytes, head_weights if is_head else weights)
            else:
                total += num_bytes
                embedding = (shape, num_bytes) if _EMBEDDING.search(name) else embedding
    if embedding is not None and not has_head:
        total += _quantized_bytes(*embedding, head_weights)
    return total


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model. A directory may contain the same weights again, in another format."""
    return sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))


def gguf_weights_bytes(file: GgufFile) -> int:
    """Return the bytes of the weights of a GGUF file on a CPU, where quantized matrices stay quantized.

    Projections that are merged into one matrix (q, k and v; gate and up) all have 8 bits if one of them has. A matrix
    that is both head and embedding is stored once. Padding is not counted.
    """
    dequantized_format = KVFormat(FORMAT_OF_DTYPE[file.dtype])
    merged_in_8_bits = {_merged_name(name) for name, tensor in file.tensors.items() if _gguf_format(tensor) == "q8"}
    total = 0
    for name, tensor in file.tensors.items():
        weights = _gguf_format(tensor)
        if weights is None:
            total += dequantized_format.bytes_of(0, prod(tensor.shape))
        else:
            weights = "q8" if _merged_name(name) in merged_in_8_bits else weights
            total += prod(tensor.shape) // _GROUP_FEATURES * _GROUP_BYTES[weights]
    return total


def _gguf_format(tensor: GgufTensor) -> str | None:
    """Return the format of a tensor in memory, `q8` or `q4`; None if it is dequantized."""
    is_matrix_of_groups = len(tensor.shape) == 2 and tensor.shape[1] % _GROUP_FEATURES == 0
    if tensor.type in FLOAT_TYPES or not is_matrix_of_groups:
        return None
    return "q4" if tensor.type in FOUR_BIT_TYPES else "q8"


def _merged_name(name: str) -> str:
    """Return a name that is the same for all projections of a layer that are merged."""
    return _MERGED_PROJECTION.sub(lambda match: f"{match[1] or match[2]}_merged", name)


def _is_quantized(name: str, shape: list[int]) -> bool:
    unquantized = (_EMBEDDING, _POSITIONS, _EXPERTS_AND_ROUTERS)
    return len(shape) == 2 and name.endswith(".weight") and not any(each.search(name) for each in unquantized)


def _quantized_bytes(shape: list[int], num_bytes: int, weights: str) -> int:
    """Return the bytes of a matrix `[out_features, in_features]` that takes `num_bytes` in the file."""
    out_features, in_features = shape
    if weights == "int8":
        return out_features * (in_features + _INT8_FEATURE_BYTES)
    if in_features % _GROUP_FEATURES:
        return num_bytes
    return out_features * in_features // _GROUP_FEATURES * _GROUP_BYTES[weights]


def _read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: the dtypes, shapes and offsets of its tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else None
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected the header of safetensors, got something else") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: expected the header of safetensors, got something else")
    header.pop("__metadata__", None)
    return header


def _sizes(file: Path, name: str, tensor: Any) -> tuple[list[int], int]:
    """Return the shape and the bytes of a tensor."""
    try:
        shape, (start, end) = tensor["shape"], tensor["data_offsets"]
        if not all(isinstance(each, int) and each >= 0 for each in (*shape, end - start)):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: {name}: expected a shape and offsets, got {shown(tensor)}") from error
    return shape, end - start
