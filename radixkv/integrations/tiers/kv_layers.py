"""The paged K/V of another engine: one tensor per layer, whose first dimension is the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.errors import UnsupportedModel


class KVLayers:
    """Copies whole blocks between an engine's K/V tensors and bytes.

    The bytes of a block are those of all layers, in the order of their names. Layers that share a tensor count once.

    Args:
        layers: by name, tensors of shape `[num_blocks * n, ...]`, where n is the number of rows per block, on any
            device and with any strides.
        num_blocks: blocks of the engine.

    Raises:
        UnsupportedModel: a layer is not such a tensor.

    Attributes:
        payload_bytes: bytes of one block.
        layout: names, shapes and dtypes of the layers, which determine the order of the bytes.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._layers: list[tuple[torch.Tensor, int, int]] = []  # tensor, rows per block, bytes per block
        seen_pointers: set[int] = set()
        descriptions: list[str] = []
        for name, layer in sorted(layers.items()):
            if not isinstance(layer, torch.Tensor) or layer.shape[0] % num_blocks:
                shape = tuple(layer.shape) if isinstance(layer, torch.Tensor) else type(layer).__name__
                raise UnsupportedModel(
                    f"layer {name}: expected a tensor whose first dimension is a multiple of {num_blocks} blocks, got "
                    f"{shape}; layers with other states than K/V cannot use the tiers"
                )
            if layer.data_ptr() in seen_pointers:
                continue
            seen_pointers.add(layer.data_ptr())
            rows_per_block = layer.shape[0] // num_blocks
            num_bytes = rows_per_block * layer[0].numel() * layer.element_size()
            self._layers.append((layer, rows_per_block, num_bytes))
            descriptions.append(f"{name} {rows_per_block}x{tuple(layer.shape[1:])} {layer.dtype}")
        self.payload_bytes = sum(num_bytes for _, _, num_bytes in self._layers)
        self.layout = "; ".join(descriptions)

    def read(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy blocks. Returns uint8 `[len(block_ids), payload_bytes]`, owned by the caller."""
        blocks = np.empty((len(block_ids), self.payload_bytes), np.uint8)
        start = 0
        for layer, rows_per_block, num_bytes in self._layers:
            copies = layer[_row_indexes(block_ids, rows_per_block, layer.device)].cpu().contiguous()
            blocks[:, start : start + num_bytes] = copies.reshape(len(block_ids), -1).view(torch.uint8).numpy()
            start += num_bytes
        return blocks

    def write(self, block_ids: Sequence[int], values: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks.

        Args:
            block_ids: the blocks.
            values: uint8 `[len(block_ids), payload_bytes]`.
        """
        start = 0
        for layer, rows_per_block, num_bytes in self._layers:
            layer_values = torch.from_numpy(np.ascontiguousarray(values[:, start : start + num_bytes]))
            shape = (len(block_ids) * rows_per_block, *layer.shape[1:])
            layer[_row_indexes(block_ids, rows_per_block, layer.device)] = (
                layer_values.view(layer.dtype).reshape(shape).to(layer.device)
            )
            start += num_bytes


def _row_indexes(block_ids: Sequence[int], rows_per_block: int, device: torch.device) -> torch.Tensor:
    """Return the rows of blocks in a layer, int64 `[len(block_ids) * rows_per_block]`."""
    first_rows = torch.tensor(block_ids, dtype=torch.int64) * rows_per_block
    return (first_rows[:, None] + torch.arange(rows_per_block)).reshape(-1).to(device)
