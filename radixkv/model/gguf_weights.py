"""Loads the weights of a GGUF file into a model of transformers.

On a CPU with compiled kernels and `model.weights = "auto"`, quantized weights of linear layers and embeddings stay
quantized:

    in the file           in memory
    Q4_0, Q4_1, Q8_0      the same codes, scales and minima
    Q4_K                  the same codes; scales and minima of groups rounded to float16
    other types           quantized to 8 bits (`q8`)

All other weights are dequantized.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from radixkv.errors import ConfigError
from radixkv.kernels.quantized_weight import GROUP_FEATURES, QuantizedWeight
from radixkv.model.layers.stored_weight import can_keep_stored_weight, keep_stored_weight, weight_without_data
from radixkv.model_files.gguf_config import ROPE_TENSORS
from radixkv.model_files.gguf_file import FLOAT_TYPES, TENSOR_TYPES, GgufFile, GgufTensor

_log = logging.getLogger(__name__)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The elements and the bytes of a block, by the type of the tensor.
_BLOCK_SIZES = {name: (block_elements, block_bytes) for name, block_elements, block_bytes in TENSOR_TYPES.values()}
_CHUNK_ELEMENTS = 2**20  # elements that are dequantized at once: 4 MiB in float32


def load_gguf_weights(
    file: GgufFile,
    model_class: type[PreTrainedModel],
    config: Any,
    dtype: torch.dtype,
    attention: str,
    *,
    keeps_quantized: bool = False,
) -> PreTrainedModel:
    """Create a model with the weights of a file. Logs the types of its tensors, and how many stay quantized.

    Args:
        file: the file.
        model_class: class of the model.
        config: the configuration that `model_config` returned for this file.
        dtype: data type of the model: that of its rows, and of all weights that do not stay quantized.
        attention: name of the attention function.
        keeps_quantized: whether quantized weights of linear layers and embeddings stay quantized. If so, the model must
            not be called before `pack_linears`; see `keep_stored_weight`.

    Raises:
        ConfigError: a weight is missing, is unknown, or has the wrong shape.
    """
    with _EmptyWithoutData(), no_init_weights():
        module = model_class._from_config(config, attn_implementation=attention, dtype=dtype).eval()
    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    gguf_names = _gguf_names(file, shapes, config)
    _require_same_names(file, gguf_names)
    for name, gguf_name in gguf_names.items():
        shape = file.tensors[gguf_name].shape
        if shape != shapes[name]:
            raise ConfigError(f"{file.path}: expected {gguf_name} of the shape {shapes[name]}, got {shape}")

    file_bytes = np.memmap(file.path, np.uint8, "r")
    quantized_names = _quantized_names(module, file, gguf_names) if keeps_quantized else ()
    weights = {}
    for name, gguf_name in gguf_names.items():
        if name in quantized_names:
            weights[name] = weight_without_data(shapes[name], dtype)
        else:
            weights[name] = _weight(file, gguf_name, file_bytes, config, dtype)
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    if missing := [name for name, weight in module.named_parameters() if weight.is_meta]:
        raise ConfigError(f"{file.path}: the weights do not fit the metadata: there is no {missing[0]}")
    for name in quantized_names:
        stored = _quantized_weight(file, gguf_names[name], file_bytes, config, dtype)
        part = module.get_submodule(name.removesuffix(".weight"))
        keep_stored_weight(part, stored)
        if config.tie_word_embeddings and part is module.get_input_embeddings():
            keep_stored_weight(module.get_output_embeddings(), stored)

    sizes = ", ".join(f"{num_bytes / 1e6:.1f} MB in {kind}" for kind, num_bytes in file.num_bytes_by_type.items())
    _log.info(
        "read a GGUF file with %s; %d weights stay quantized, and others are dequantized to %s",
        sizes,
        len(quantized_names),
        str(dtype).removeprefix("torch."),
    )
    return module


class _EmptyWithoutData(TorchFunctionMode):
    """Lets `torch.empty`, with which modules create parameters, return tensors without data unless a device is given.

    In contrast to `torch.device("meta")`, buffers have data. To compute them without data, PyTorch would import SymPy
    (40 MB).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _quantized_names(module: nn.Module, file: GgufFile, gguf_names: dict[str, str]) -> list[str]:
    """Return the names of the weights that stay quantized."""
    candidates = [f"{name}.weight" for name, part in module.named_modules() if can_keep_stored_weight(part)]
    quantized_names = []
    for name in candidates:
        if name in gguf_names:
            tensor = file.tensors[gguf_names[name]]
            if tensor.type not in FLOAT_TYPES and tensor.shape[1] % GROUP_FEATURES == 0:
                quantized_names.append(name)
    return quantized_names


def _quantized_weight(
    file: GgufFile, gguf_name: str, file_bytes: _Bytes, config: Any, dtype: torch.dtype
) -> QuantizedWeight:
    """Return a weight in a format of radixkv's kernels, with its rows in the order of transformers."""
    tensor = file.tensors[gguf_name]
    tensor_bytes = np.array(file_bytes[tensor.offset : tensor.offset + tensor.num_bytes])
    _, block_bytes = _BLOCK_SIZES[tensor.type]
    blocks = torch.from_numpy(tensor_bytes).view(tensor.shape[0], -1, block_bytes)
    quantized: QuantizedWeight | None = None
    if tensor.type == "Q8_0":  # a block is a scale and codes
        codes = blocks[..., 2:].contiguous().view(torch.int8)
        quantized = QuantizedWeight(codes.flatten(1), _leading_float16(blocks), None, dtype)
    elif tensor.type == "Q4_0":  # a block is a scale and codes, of which code 8 means zero
        scales = _leading_float16(blocks)
        quantized = QuantizedWeight(_nibbles(blocks[..., 2:]).flatten(1), scales, -8 * scales, dtype)
    elif tensor.type == "Q4_1":  # a block is a scale, a minimum, and codes
        scales, minima = _leading_float16(blocks), _leading_float16(blocks[..., 2:])
        quantized = QuantizedWeight(_nibbles(blocks[..., 4:]).flatten(1), scales, minima, dtype)
    elif tensor.type == "Q4_K":
        quantized = _from_q4_k(blocks, dtype)
    if quantized is None or not quantized.is_finite:
        quantized = QuantizedWeight.quantize(_values(tensor, file_bytes, torch.float32), 8, dtype)
    order = _row_order(file, gguf_name, len(quantized), config)
    return quantized if order is None else quantized.rows(order)


def _from_q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Read blocks of 256 elements, uint8 `[num_rows, blocks per row, 144]`.

    bytes of a block    [0, 2)    scale, float16
                        [2, 4)    negated minimum, float16
                        [4, 16)   6-bit factors of scale and minimum, one of each for 32 elements
                        [16, 144) codes of 4 bits
    """
    # Factors of the first four groups are the lower 6 bits of 4 bytes for scales, and of 4 bytes for minima. Those of
    # the last four groups have their lower 4 bits in the last 4 bytes, and their upper 2 bits in the first 8.
    factor_bytes = blocks[..., 4:16].int()
    for_scales, for_minima, for_both = factor_bytes[..., :4], factor_bytes[..., 4:8], factor_bytes[..., 8:]
    scale_factors = torch.cat((for_scales & 63, (for_both & 15) | (for_scales >> 6) << 4), -1)
    minimum_factors = torch.cat((for_minima & 63, (for_both >> 4) | (for_minima >> 6) << 4), -1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return QuantizedWeight(
        codes.flatten(1),
        (_leading_float16(blocks).float()[..., None] * scale_factors).half().flatten(1),
        (-_leading_float16(blocks[..., 2:]).float()[..., None] * minimum_factors).half().flatten(1),
        dtype,
    )


def _leading_float16(blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 number at the beginning of each block."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0]


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the lower four bits of all bytes, then the upper four bits."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _gguf_names(file: GgufFile, names_of_model: Iterable[str], config: Any) -> dict[str, str]:
    """Return the names in the file by those of transformers, for all weights that a file has."""
    import gguf

    architectures = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[file.architecture], config.num_hidden_layers)
    names = {}
    for name in names_of_model:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        names[name] = f"{name_map.get_name(base)}.{suffix}"
    return names


def _require_same_names(file: GgufFile, gguf_names: dict[str, str]) -> None:
    """Refuse a file whose tensors are not exactly those of the model."""
    expected_names = set(gguf_names.values())
    names_in_file = set(file.tensors) - set(ROPE_TENSORS)
    for problem, wrong_names in (
        ("without {} of them", expected_names - names_in_file),
        ("with {} others", names_in_file - expected_names),
    ):
        if wrong_names:
            examples = ", ".join(sorted(wrong_names)[:3])
            raise ConfigError(
                f"{file.path}: expected the tensors of a {file.architecture} model, got a file "
                f"{problem.format(len(wrong_names))}, such as {examples}"
            )


def _weight(file: GgufFile, gguf_name: str, file_bytes: _Bytes, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in the form that transformers uses."""
    tensor = file.tensors[gguf_name]
    if file.architecture.startswith("gemma") and gguf_name.endswith("norm.weight"):
        # The file contains 1 + weight. The 1 must be subtracted before rounding.
        return (_values(tensor, file_bytes, torch.float32) - 1).to(dtype)
    weight = _values(tensor, file_bytes, dtype)
    order = _row_order(file, gguf_name, len(weight), config)
    return weight if order is None else weight[order]


def _row_order(file: GgufFile, gguf_name: str, num_rows: int, config: Any) -> torch.Tensor | None:
    """Return the indices of a tensor's rows in the order of transformers; None if the rows are in that order.

    The RoPE of transformers pairs elements of the two halves of a head, and that of llama.cpp adjacent elements.
    """
    if file.architecture != "llama":
        return None
    if ".attn_q." in gguf_name:
        num_heads = config.num_attention_heads
    elif ".attn_k." in gguf_name:
        num_heads = config.num_key_value_heads
    else:
        return None
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _values(tensor: GgufTensor, file_bytes: _Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a tensor in `dtype`."""
    values = torch.empty(tensor.shape, dtype=dtype)
    flat, end = values.view(-1), 0
    for chunk in _chunks(tensor, file_bytes):
        flat[end : end + chunk.numel()] = chunk
        end += chunk.numel()
    return values


def _chunks(tensor: GgufTensor, file_bytes: _Bytes) -> Iterator[torch.Tensor]:
    """Iterate over the elements of a tensor, in chunks of whole blocks."""
    block_elements, block_bytes = _BLOCK_SIZES[tensor.type]
    blocks = file_bytes[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, block_bytes)
    chunk_blocks = max(1, _CHUNK_ELEMENTS // block_elements)
    for start in range(0, len(blocks), chunk_blocks):
        chunk = blocks[start : start + chunk_blocks]
        if tensor.type in FLOAT_TYPES:
            yield torch.from_numpy(np.array(chunk)).view(-1).view(_FLOAT_DTYPES[tensor.type])
        else:
            yield torch.from_numpy(_dequantize(chunk, tensor.type)).view(-1)


def _dequantize(blocks: _Bytes, kind: str) -> np.ndarray[Any, Any]:
    import gguf

    # As one row, because the package calls numpy for every 16 rows.
    values: np.ndarray[Any, Any] = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values)
