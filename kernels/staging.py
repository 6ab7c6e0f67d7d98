"""Brings what the host prepares for a step to the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

_ALIGNMENT_BYTES = 16  # what kernels may assume of an address


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Bring a tensor from the host to a device.

    A GPU gets it through pinned memory, so that the host does not wait: a copy from pageable memory waits for
    everything that was launched before it. Torch does not reuse the pinned memory before the copy is done.

    Args:
        tensor: any shape. Do not change it afterwards: on a CPU it is returned itself.
        device: device of the result.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class StagedArrays:
    """Arrays in one region that the host fills for every step, so that one copy brings all of them to the device.

        host      [ input_ids )[ slots )[ block_tables ............ )    pinned; two of them, in turn, so that
                     │ upload                                            one is filled while the other comes over
        device    [ input_ids )[ slots )[ block_tables ............ )    always at the same addresses

    Attributes:
        device: the arrays on the device, by name. Zeros at first, then what the last upload wrote.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """Allocate both sides.

        Args:
            arrays: shapes and dtypes by name.
            device: device to which they are uploaded.
        """
        num_bytes = [_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in arrays.values()]
        *_, (last_shape, last_dtype) = arrays.values()
        self._last_start = sum(num_bytes[:-1])
        self._last_row_bytes = math.prod(last_shape[1:]) * last_dtype.itemsize
        regions = [torch.zeros(sum(num_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self._device_region = torch.zeros_like(regions[0], device=device)
        self.device = _views(self._device_region, arrays, num_bytes)
        self._hosts = deque((region, _views(region, arrays, num_bytes)) for region in regions)  # the next one first

    @property
    def host(self) -> dict[str, torch.Tensor]:
        """The arrays that the next upload brings over, by name. The upload before the last one must be done."""
        return self._hosts[0][1]

    def upload(self, num_rows: int) -> None:
        """Bring the host's arrays to the device. Then `host` is the other region, with what was written before.

        Args:
            num_rows: rows to bring of the last array; the other arrays come whole.
        """
        end = self._last_start + num_rows * self._last_row_bytes
        region, _ = self._hosts[0]
        self._device_region[:end].copy_(region[:end], non_blocking=True)
        self._hosts.rotate()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _views(
    region: torch.Tensor, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], num_bytes: Sequence[int]
) -> dict[str, torch.Tensor]:
    parts = torch.split(region, list(num_bytes))
    return {
        name: part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for part, (name, (shape, dtype)) in zip(parts, arrays.items(), strict=True)
    }
