"""The K/V of cached tokens, one pair of tensors per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.blocks import BlockCopy, BlockIds

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer


@dataclass(frozen=True, slots=True)
class _Layer:
    """Keys and values of one layer, `[num_kv_heads, num_slots, head_dim]`, and the device that computes them."""

    keys: torch.Tensor
    values: torch.Tensor
    device: torch.device


class KVSlots:
    """One slot per cached token. A layer's tensors are allocated when it is first written.

    Layers may differ in heads, head sizes, dtype and device, and so may keys and values.

    Args:
        num_blocks, block_size: number of blocks; a block is `block_size` slots.
        device: where to store K/V; None for the device that computes them.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | None) -> None:
        self._num_slots = num_blocks * block_size
        self._block_size = block_size
        self._device = device
        self._layers: dict[int, _Layer] = {}

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that have been written."""
        return tuple(self._layers)

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return sum(each.keys.nbytes + each.values.nbytes for each in self._layers.values())

    def read(self, layer_id: int, block_ids: BlockIds, start: int, end: int) -> KV:
        """Copy the K/V of positions `start` to `end` of a sequence out of its blocks.

        Returns:
            Keys and values, `[num_kv_heads, end - start, head_dim]`, on the device that computed them.
        """
        layer = self._layers[layer_id]
        slots = self._slots(block_ids, start, end).to(layer.keys.device)
        keys, values = layer.keys.index_select(1, slots), layer.values.index_select(1, slots)
        return keys.to(layer.device), values.to(layer.device)

    def write(self, block_ids: BlockIds, start: int, end: int, kv: Mapping[int, KV]) -> None:
        """Copy the K/V of positions `start` to `end` of a sequence into its blocks.

        Args:
            block_ids, start, end: the blocks of the sequence, and the positions.
            kv: keys and values by layer, `[num_kv_heads, end - start, head_dim]`.
        """
        slots = self._slots(block_ids, start, end)
        for layer_id, (keys, values) in kv.items():
            layer = self._layers.get(layer_id)
            if layer is None:
                layer = self._layers[layer_id] = _Layer(self._empty_like(keys), self._empty_like(values), keys.device)
            device = layer.keys.device
            layer.keys.index_copy_(1, slots.to(device), keys.to(device))
            layer.values.index_copy_(1, slots.to(device), values.to(device))

    def copy(self, copy: BlockCopy) -> None:
        """Copy the K/V of one block to another block, in all layers."""
        size = self._block_size
        for layer in self._layers.values():
            for tensor in (layer.keys, layer.values):
                source = tensor[:, copy.source * size : (copy.source + 1) * size]
                tensor[:, copy.target * size : (copy.target + 1) * size] = source

    def free(self) -> None:
        """Free all memory. The next layers that are written may have other shapes."""
        self._layers = {}

    def _slots(self, block_ids: BlockIds, start: int, end: int) -> torch.Tensor:
        positions = np.arange(start, end)
        slots = block_ids[positions // self._block_size].astype(np.int64) * self._block_size
        return torch.from_numpy(slots + positions % self._block_size)

    def _empty_like(self, states: torch.Tensor) -> torch.Tensor:
        num_heads, _, head_dim = states.shape
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            return torch.empty(
                num_heads, self._num_slots, head_dim, dtype=states.dtype, device=self._device or states.device
            )
