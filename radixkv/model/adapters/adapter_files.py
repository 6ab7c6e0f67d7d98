"""Reads an adapter directory in peft's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from radixkv.config.regular_file import read_regular
from radixkv.errors import InvalidAdapter
from radixkv.model.adapters.adapter_config import TENSOR_FILE, LoraFields, missing_file, read_config
from radixkv.model.attention.latent import absorbed_layers
from radixkv.model.layers.packed_linear import PackedLinear, PackedSlice
from radixkv.tokens import TOKEN_BYTES


class LayerShape(NamedTuple):
    """Features of a linear layer, and the dtype of its rows, which may differ from the model's, as in some routers."""

    in_features: int
    out_features: int
    dtype: torch.dtype


def adaptable_layers(module: PreTrainedModel) -> dict[str, LayerShape]:
    """Return the linear layers of a model that adapters may change, packed or not, by their names in transformers.

    The LM head is excluded, since it runs only on the rows that need logits. Also excluded are experts, which see a
    part of the rows, the layers of `absorbed_layers`, and layers of classes derived from `nn.Linear`, such as PhiMoE's
    router, which returns several tensors.
    """
    excluded_ids = {id(module.get_output_embeddings()), *map(id, absorbed_layers(module))}
    return {
        name: shape
        for name, part in module.named_modules()
        if id(part) not in excluded_ids and ".experts." not in name and (shape := _shape_of(part)) is not None
    }


def _shape_of(part: nn.Module) -> LayerShape | None:
    if isinstance(part, (PackedLinear, PackedSlice)):
        return LayerShape(part.in_features, part.out_features, part.dtype)
    if type(part) is nn.Linear:
        return LayerShape(part.in_features, part.out_features, part.weight.dtype)
    if type(part) is Conv1D:
        weight = part.get_parameter("weight")
        in_features, out_features = map(int, weight.shape)
        return LayerShape(in_features, out_features, weight.dtype)
    return None


_DIGEST_BYTES = 20
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")


class AdaptableModel(Protocol):
    """The model that adapters must fit, such as `radixkv.model.model.Model`.

    Attributes:
        module: the transformers model.
        vocab_size: token ids are below this.
    """

    module: PreTrainedModel
    vocab_size: int

    def try_adapter(self, files: AdapterFiles) -> None:
        """Check the matmuls of an adapter. Raises InvalidAdapter if they are not batch-invariant on this machine."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of a linear layer, which adds `up @ (down @ row)` to the output of each row.

    Attributes:
        down: `[rank, in_features]` on the host, in the layer's dtype.
        up: `[out_features, rank]` on the host, in the layer's dtype, multiplied by the adapter's scale.
    """

    down: torch.Tensor
    up: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read and fits the model.

    Attributes:
        digest: hexadecimal digest of everything that changes outputs: names, scales and tensors as they are in the
            file, and the invocation tokens. Adapters with equal digests give equal outputs.
        rank: the largest rank of its layers.
        num_bytes: bytes of its tensors, each in the dtype of its layer.
        invocation_token_ids: see `LoraFields`.
        layers: the updates, by the names of the adapted layers.
    """

    digest: str
    rank: int
    num_bytes: int
    invocation_token_ids: tuple[int, ...] | None
    layers: Mapping[str, LowRank]

    def applies_from(self, tokens: bytes) -> int | None:
        """Return the position from which the adapter applies to a prompt. Earlier tokens use the base model.

        >>> AdapterFiles("", 8, 0, (7, 8), {}).applies_from(np.array([7, 8, 1, 7, 8, 2], dtype="<u4").tobytes())
        3

        Args:
            tokens: the whole prompt, little-endian uint32 bytes. Generated tokens are not searched.

        Returns:
            0 for an adapter without invocation tokens, otherwise the start of their last occurrence. None if they do
            not occur: prompt and generated tokens then use only the base model, as with peft.
        """
        if self.invocation_token_ids is None:
            return 0
        invocation = np.array(self.invocation_token_ids, dtype="<u4").tobytes()
        end = len(tokens)
        while (start := tokens.rfind(invocation, 0, end)) >= 0:
            if start % TOKEN_BYTES == 0:
                return start // TOKEN_BYTES
            end = start + len(invocation) - 1  # the match started inside a token
        return None


def read_adapter(path: str | Path, model: AdaptableModel, max_bytes: int | None = None) -> AdapterFiles:
    """Read an adapter, and check its files and matmuls of its shapes. May be called on any thread.

    The call takes as long as reading the files, and 50 ms for each shape that this process has not checked yet.

    Args:
        path: directory of the adapter.
        model: the model that the adapter must fit.
        max_bytes: maximum size of adapter_model.safetensors; None for no limit.

    Raises:
        InvalidAdapter: a file is missing or can't be read, the adapter requires something that is not supported, or
            it does not fit the model.
    """
    directory = Path(path)
    config = read_config(directory, model.vocab_size)
    tensors = _read_tensors(directory, max_bytes)
    shapes = adaptable_layers(model.module)
    pairs = _pair_matrices(tensors)
    if not pairs:
        raise InvalidAdapter(f"{TENSOR_FILE}: expected tensors of at least one layer, got none")
    layers = {}
    for layer, (down, up) in sorted(pairs.items()):
        if layer not in shapes:
            raise InvalidAdapter(f"{TENSOR_FILE} {layer}: expected {_expected_and_got(model, layer)}")
        _require_shapes(layer, shapes[layer], config.rank_of(layer), down, up)
        layers[layer] = _scaled_low_rank(layer, down, up, config.scale_of(layer), shapes[layer].dtype)
    files = AdapterFiles(
        digest=_digest(config, pairs),
        rank=max(each.down.shape[0] for each in layers.values()),
        num_bytes=sum(each.num_bytes for each in layers.values()),
        invocation_token_ids=config.invocation_token_ids,
        layers=layers,
    )
    model.try_adapter(files)
    return files


def _read_tensors(directory: Path, max_bytes: int | None) -> dict[str, torch.Tensor]:
    """Read the tensors in one pass, so that digest and served tensors match even if the file changes meanwhile."""
    file = directory / TENSOR_FILE
    try:
        size = file.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise InvalidAdapter(f"{TENSOR_FILE}: expected at most {max_bytes} bytes, got {size}")
        return safetensors.torch.load(read_regular(file, max_bytes))
    except FileNotFoundError:
        raise missing_file(TENSOR_FILE) from None
    except OSError as error:
        raise InvalidAdapter(f"{TENSOR_FILE}: expected a readable file, got: {error.strerror or 'an error'}") from error
    except (ValueError, KeyError, SafetensorError) as error:
        raise InvalidAdapter(f"{TENSOR_FILE}: expected safetensors, got another format or a damaged file") from error


def _pair_matrices(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Group tensors by layer. Rejects tensors other than the two matrices of a low-rank update."""
    matrices: dict[str, dict[str, torch.Tensor]] = {}  # by layer, then by side: A or B
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise InvalidAdapter(
                f"{TENSOR_FILE} {name}: expected base_model.model.LAYER.lora_A.weight or lora_B.weight"
            )
        matrices.setdefault(match["layer"], {})[match["side"]] = tensor
    for layer, sides in matrices.items():
        if sides.keys() != {"A", "B"}:
            raise InvalidAdapter(f"{TENSOR_FILE} {layer}: expected lora_A and lora_B, got lora_{''.join(sides)} only")
    return {layer: (sides["A"], sides["B"]) for layer, sides in matrices.items()}


def _expected_and_got(model: AdaptableModel, layer: str) -> str:
    """Describe what was expected instead of a layer that cannot be adapted, and what the layer is."""
    parts = dict(model.module.named_modules())
    if layer not in parts:
        return "a layer of the model, got none of that name"
    if any(parts[layer] is each for each in absorbed_layers(model.module)):
        return f"a layer that can be adapted, got {layer.rpartition('.')[2]} of latent attention, which is absorbed"
    return f"a linear layer of attention or of an MLP, got {type(parts[layer]).__name__}"


def _require_shapes(layer: str, shape: LayerShape, rank: int, down: torch.Tensor, up: torch.Tensor) -> None:
    matrices = (("lora_A", down, (rank, shape.in_features)), ("lora_B", up, (shape.out_features, rank)))
    for name, tensor, expected in matrices:
        if tuple(tensor.shape) != expected:
            raise InvalidAdapter(f"{TENSOR_FILE} {layer}.{name}: expected shape {expected}, got {tuple(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise InvalidAdapter(f"{TENSOR_FILE} {layer}.{name}: expected floating-point numbers, got {tensor.dtype}")


def _scaled_low_rank(layer: str, down: torch.Tensor, up: torch.Tensor, scale: float, dtype: torch.dtype) -> LowRank:
    low_rank = LowRank(down.to(dtype), (up.float() * scale).to(dtype))
    if not (bool(low_rank.down.isfinite().all()) and bool(low_rank.up.isfinite().all())):
        dtype_name = str(dtype).removeprefix("torch.")
        raise InvalidAdapter(f"{TENSOR_FILE} {layer}: contains values that are not finite in {dtype_name}")
    return low_rank


def _digest(config: LoraFields, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Digest everything that changes outputs. Each piece is preceded by its length, so that the encoding is unique."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(piece: bytes) -> None:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)

    add(json.dumps(config.invocation_token_ids).encode())
    for layer, tensors in sorted(pairs.items()):
        formats = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
        add(json.dumps([layer, config.scale_of(layer), formats]).encode())
        for tensor in tensors:
            add(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
