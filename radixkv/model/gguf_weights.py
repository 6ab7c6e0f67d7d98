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

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2**20  # number of elements that are dequantized at once: 4 MiB in float32


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
    names = _gguf_names(file, shapes, config)
    _require_same_names(file, names)
    for name, gguf_name in names.items():
        shape = file.tensors[gguf_name].shape
        if shape != shapes[name]:
            raise ConfigError(f"{file.path}: expected {gguf_name} of the shape {shapes[name]}, got {shape}")
    data = np.memmap(file.path, np.uint8, "r")
    quantized_names = _quantized_names(module, file, names) if keeps_quantized else ()
    weights = {
        name: weight_without_data(shapes[name], dtype)
        if name in quantized_names
        else _weight(file, gguf_name, data, config, dtype)
        for name, gguf_name in names.items()
    }
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    if missing := [name for name, weight in module.named_parameters() if weight.is_meta]:
        raise ConfigError(f"{file.path}: the weights do not fit the metadata: there is no {missing[0]}")
    for name in quantized_names:
        stored = _quantized_weight(file, names[name], data, config, dtype)
        part = module.get_submodule(name.removesuffix(".weight"))
        keep_stored_weight(part, stored)
        if config.tie_word_embeddings and part is module.get_input_embeddings():
            keep_stored_weight(module.get_output_embeddings(), stored)
    sizes = ", ".join(f"{each / 1e6:.1f} MB in {kind}" for kind, each in file.num_bytes_by_type.items())
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


def _quantized_names(module: nn.Module, file: GgufFile, names: dict[str, str]) -> list[str]:
    """Return the names of the weights that stay quantized."""
    candidates = [f"{name}.weight" for name, part in module.named_modules() if can_keep_stored_weight(part)]
    return [
        name
        for name in candidates
        if name in names
        and (tensor := file.tensors[names[name]]).type not in FLOAT_TYPES
        and tensor.shape[1] % GROUP_FEATURES == 0
    ]


def _quantized_weight(file: GgufFile, name: str, data: _Bytes, config: Any, dtype: torch.dtype) -> QuantizedWeight:
    """Return a weight in a format of radixkv's kernels, with its rows in the order of transformers."""
    tensor = file.tensors[name]
    num_groups = tensor.shape[1] // GROUP_FEATURES
    rows = torch.from_numpy(np.array(data[tensor.offset : tensor.offset + tensor.num_bytes])).view(tensor.shape[0], -1)
    quantized: QuantizedWeight | None = None
    if tensor.type == "Q8_0":
        blocks = rows.view(-1, num_groups, 34)
        quantized = QuantizedWeight(
            blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks), None, dtype
        )
    elif tensor.type == "Q4_0":
        blocks = rows.view(-1, num_groups, 18)
        scales = _halves(blocks)
        quantized = QuantizedWeight(_nibbles(blocks[..., 2:]).flatten(1), scales, -8 * scales, dtype)
    elif tensor.type == "Q4_1":
        blocks = rows.view(-1, num_groups, 20)
        quantized = QuantizedWeight(
            _nibbles(blocks[..., 4:]).flatten(1), _halves(blocks), _halves(blocks[..., 2:]), dtype
        )
    elif tensor.type == "Q4_K":
        quantized = _from_q4_k(rows, dtype)
    if quantized is None or not quantized.is_finite:
        quantized = QuantizedWeight.quantize(_values(tensor, data, torch.float32), 8, dtype)
    order = _row_order(file, name, len(quantized), config)
    return quantized if order is None else quantized.rows(order)


def _from_q4_k(rows: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Read blocks of 256 elements: a scale and a minimum per block, their 6-bit factors per 32 elements, and codes."""
    blocks = rows.view(len(rows), -1, 144)
    packed = blocks[..., 4:16].int()
    lower, upper, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((lower & 63, (high & 15) | (lower >> 6) << 4), -1)
    minima = torch.cat((upper & 63, (high >> 4) | (upper >> 6) << 4), -1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return QuantizedWeight(
        codes.flatten(1),
        (_halves(blocks).float()[..., None] * scales).half().flatten(1),
        (-_halves(blocks[..., 2:]).float()[..., None] * minima).half().flatten(1),
        dtype,
    )


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 number at the beginning of each block."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0]


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the lower four bits of all bytes, then the upper four bits."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _gguf_names(file: GgufFile, names_of_model: Iterable[str], config: Any) -> dict[str, str]:
    """Return the names in the file by those of transformers, for all weights that a file has."""
    import gguf

    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[file.architecture], config.num_hidden_layers)
    names = {}
    for name in names_of_model:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        names[name] = f"{name_map.get_name(base)}.{suffix}"
    return names


def _require_same_names(file: GgufFile, names: dict[str, str]) -> None:
    """Refuse a file whose tensors are not exactly those of the model."""
    expected = set(names.values())
    names_in_file = set(file.tensors) - set(ROPE_TENSORS)
    for what, tensors in (
        ("without {} of them", expected - names_in_file),
        ("with {} others", names_in_file - expected),
    ):
        if tensors:
            few = ", ".join(sorted(tensors)[:3])
            raise ConfigError(
                f"{file.path}: expected the tensors of a {file.architecture} model, got a file "
                f"{what.format(len(tensors))}, such as {few}"
            )


def _weight(file: GgufFile, name: str, data: _Bytes, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in the form that transformers uses."""
    tensor = file.tensors[name]
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        # The file contains 1 + weight. The 1 must be subtracted before rounding.
        return (_values(tensor, data, torch.float32) - 1).to(dtype)
    weight = _values(tensor, data, dtype)
    order = _row_order(file, name, len(weight), config)
    return weight if order is None else weight[order]


def _row_order(file: GgufFile, name: str, num_rows: int, config: Any) -> torch.Tensor | None:
    """Return the rows of a tensor in the order of transformers; None if they are in that order.

    The RoPE of transformers pairs elements of the two halves of a head, and that of llama.cpp adjacent elements.
    """
    if file.architecture != "llama":
        return None
    if ".attn_q." in name:
        num_heads = config.num_attention_heads
    elif ".attn_k." in name:
        num_heads = config.num_key_value_heads
    else:
        return None
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _values(tensor: GgufTensor, data: _Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a tensor in `dtype`."""
    values = torch.empty(tensor.shape, dtype=dtype)
    flat, end = values.view(-1), 0
    for piece in _pieces(tensor, data):
        flat[end : end + piece.numel()] = piece
        end += piece.numel()
    return values


def _pieces(tensor: GgufTensor, data: _Bytes) -> Iterator[torch.Tensor]:
    """Iterate over the elements of a tensor, in whole blocks."""
    per_block, block_bytes = next(each[1:] for each in TENSOR_TYPES.values() if each[0] == tensor.type)
    blocks = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, block_bytes)
    step = max(1, _CHUNK // per_block)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        if tensor.type in FLOAT_TYPES:
            yield torch.from_numpy(np.array(piece)).view(-1).view(_FLOATS[tensor.type])
        else:
            yield torch.from_numpy(_dequantize(piece, tensor.type)).view(-1)


def _dequantize(blocks: _Bytes, kind: str) -> np.ndarray[Any, Any]:
    import gguf

    # As one row, because the package calls numpy for every 16 rows.
    values: np.ndarray[Any, Any] = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values)
