"""The K/V of cached tokens, one pair of tensors per layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.errors import InvalidRequest
from radixkv.kernels.quantization import INT4, dequantize, key_dtype, quantize
from radixkv.kernels.reference import hadamard_transform

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer

# The dtypes that values are quantized to; `key_dtype` gives those of keys. None stores both as the model computes them.
KV_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "k8v4": INT4,
}


class _States:
    """The keys, or the values, of one layer.

    Args:
        like: states as the model computes them, `[num_kv_heads, num_positions, head_dim]`.
        num_slots: number of slots.
        device: where to store them.
        quantized_dtype: dtype to which they are quantized, with a float32 scale per vector; None to store them as they
            are.

    Raises:
        InvalidRequest: the size of a vector is odd, and the dtype is int4.

    Attributes:
        dtype: the dtype that the model computes.
        tensors: the stored elements, `[num_kv_heads, num_slots, n]`, and the scales, `[num_kv_heads, num_slots, 1]`,
            if there are any.
    """

    def __init__(
        self, like: torch.Tensor, num_slots: int, device: torch.device, quantized_dtype: torch.dtype | None
    ) -> None:
        if quantized_dtype == INT4 and like.shape[2] % 2:
            raise InvalidRequest(f"kv_dtype: expected an even head size for k8v4, got {like.shape[2]}")
        self.dtype = like.dtype
        self._quantized_dtype = quantized_dtype
        encoded = self._encode(torch.zeros_like(like[:, :1], device=device))
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            self.tensors = tuple(
                torch.empty(each.shape[0], num_slots, each.shape[2], dtype=each.dtype, device=device)
                for each in encoded
            )

    def __str__(self) -> str:
        num_heads, _, size = self.tensors[0].shape
        return f"{num_heads}x{size} {self.dtype} {self._quantized_dtype}"

    def read(self, slots: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy the states of some slots to a device, in the dtype of the model."""
        copies = [each.index_select(1, slots.to(each.device)).to(device) for each in self.tensors]
        if self._quantized_dtype is None:
            return copies[0]
        values, scales = copies
        if self._quantized_dtype == torch.float8_e4m3fn:
            values = values.view(self._quantized_dtype)
        if self._quantized_dtype == INT4:  # rotated before they were quantized, which makes 4 bits more accurate
            return hadamard_transform(dequantize(values, scales[..., 0], INT4), self.dtype)
        return dequantize(values, scales[..., 0], self._quantized_dtype, self.dtype)

    def write(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Copy states, `[num_kv_heads, len(slots), head_dim]`, to some slots."""
        for stored, new in zip(self.tensors, self._encode(states), strict=True):
            stored.index_copy_(1, slots.to(stored.device), new.to(stored.device))

    def _encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._quantized_dtype is None:
            return (states,)
        if self._quantized_dtype == INT4:
            states = hadamard_transform(states, torch.float32)
        values, scales = quantize(states, self._quantized_dtype)
        return values.view(torch.int8), scales[..., None]  # indexing is not implemented for every 8-bit dtype


@dataclass(frozen=True, slots=True)
class _Layer:
    """The states of one layer, and the device that computes them."""

    keys: _States
    values: _States
    device: torch.device


class KVSlots:
    """One slot per cached token. A layer's tensors are allocated by `allocate`, or when it is first written.

    Layers may differ in heads, head sizes, dtype and device, and so may keys and values.

    Args:
        num_blocks, block_size: number of blocks; a block is `block_size` slots.
        device: where to store K/V; None for the device that computes them.
        kv_dtype: how to store them, a key of `KV_DTYPES`.

    Raises:
        InvalidRequest: `kv_dtype` is unknown.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | None, kv_dtype: str) -> None:
        if kv_dtype not in KV_DTYPES:
            raise InvalidRequest(f"kv_dtype: expected one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
        self._num_slots = num_blocks * block_size
        self._block_size = block_size
        self._device = device
        self._kv_dtype = KV_DTYPES[kv_dtype]
        self._layers: dict[int, _Layer] = {}

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that are allocated."""
        return tuple(self._layers)

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return sum(each.nbytes for each in self._tensors())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers that are allocated."""
        return self.num_bytes * self._block_size // self._num_slots

    @property
    def layout(self) -> str:
        """Description of the layers, which determines the order of the bytes of a block."""
        return "; ".join(f"{layer_id} {each.keys} {each.values}" for layer_id, each in sorted(self._layers.items()))

    def allocate(self, kv: Mapping[int, KV]) -> None:
        """Allocate the layers that have not been written yet.

        Args:
            kv: keys and values by layer, `[num_kv_heads, num_positions, head_dim]`. The K/V that are written later must
                have the same dtypes and devices, and the same shapes except for the number of positions.
        """
        for layer_id, states in kv.items():
            if layer_id not in self._layers:
                keys, values = states
                quantized_key_dtype = None if self._kv_dtype is None else key_dtype(self._kv_dtype)
                self._layers[layer_id] = _Layer(
                    _States(keys, self._num_slots, self._device or keys.device, quantized_key_dtype),
                    _States(values, self._num_slots, self._device or values.device, self._kv_dtype),
                    keys.device,
                )

    def read(self, layer_id: int, block_ids: BlockIds, start: int, end: int) -> KV:
        """Copy the K/V of positions `start` to `end` of a sequence out of its blocks.

        Returns:
            Keys and values, `[num_kv_heads, end - start, head_dim]`, on the device that computed them.
        """
        layer = self._layers[layer_id]
        slots = self._slots(block_ids, start, end)
        return layer.keys.read(slots, layer.device), layer.values.read(slots, layer.device)

    def write(self, block_ids: BlockIds, start: int, end: int, kv: Mapping[int, KV]) -> None:
        """Copy the K/V of positions `start` to `end` of a sequence into its blocks.

        Args:
            block_ids, start, end: the blocks of the sequence, and the positions.
            kv: keys and values by layer, `[num_kv_heads, end - start, head_dim]`.
        """
        self.allocate(kv)
        slots = self._slots(block_ids, start, end)
        for layer_id, (keys, values) in kv.items():
            self._layers[layer_id].keys.write(slots, keys)
            self._layers[layer_id].values.write(slots, values)

    def read_blocks(self, block_ids: BlockIds) -> npt.NDArray[np.uint8]:
        """Copy whole blocks as they are stored. Returns uint8 `[len(block_ids), block_bytes]`."""
        slots = self._slots(block_ids, 0, len(block_ids) * self._block_size)
        blocks = np.empty((len(block_ids), self.block_bytes), np.uint8)
        start = 0
        for tensor in self._tensors():
            states = tensor.index_select(1, slots.to(tensor.device)).cpu()
            by_block = states.view(states.shape[0], -1, self._block_size, states.shape[2]).transpose(0, 1).flatten(1)
            end = start + by_block.shape[1] * by_block.element_size()
            blocks[:, start:end] = by_block.view(torch.uint8).numpy()
            start = end
        return blocks

    def write_blocks(self, block_ids: BlockIds, blocks: npt.NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with what `read_blocks` returned."""
        slots = self._slots(block_ids, 0, len(block_ids) * self._block_size)
        start = 0
        for tensor in self._tensors():
            num_heads, _, size = tensor.shape
            end = start + num_heads * self._block_size * size * tensor.element_size()
            elements = torch.from_numpy(np.ascontiguousarray(blocks[:, start:end])).view(tensor.dtype)
            by_head = elements.view(-1, num_heads, self._block_size, size).transpose(0, 1).flatten(1, 2)
            tensor.index_copy_(1, slots.to(tensor.device), by_head.to(tensor.device))
            start = end

    def copy(self, copy: BlockCopy) -> None:
        """Copy the K/V of one block to another block, in all layers."""
        size = self._block_size
        for tensor in self._tensors():
            source = tensor[:, copy.source * size : (copy.source + 1) * size]
            tensor[:, copy.target * size : (copy.target + 1) * size] = source

    def free(self) -> None:
        """Free all memory. The next layers that are written may have other shapes."""
        self._layers = {}

    def _tensors(self) -> Iterator[torch.Tensor]:
        for _, layer in sorted(self._layers.items()):
            yield from (*layer.keys.tensors, *layer.values.tensors)

    def _slots(self, block_ids: BlockIds, start: int, end: int) -> torch.Tensor:
        positions = np.arange(start, end)
        slots = block_ids[positions // self._block_size].astype(np.int64) * self._block_size
        return torch.from_numpy(slots + positions % self._block_size)
