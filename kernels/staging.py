"""What a step's host work makes, on its way to the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

_ALIGNMENT_BYTES = 16  # what kernels may assume of an address


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Bring a tensor from the host to a device.

    A GPU gets it through pinned memory, so that the host goes on at once: from pageable memory a copy waits for all
    that was launched before it. Torch does not use the pinned memory again before the copy is done.

    Args:
        tensor: any shape; not to be changed afterwards, since on a CPU it is what is returned.
        device: where the tensor is to be.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class StagedArrays:
    """Arrays that the host fills again and again, in one region, so that one copy brings them all to the device.

        host      [ input_ids )[ slots )[ block_tables ............ )    pinned; two of them, in turn, so that
                     │ upload                                            one is filled while the other comes over
        device    [ input_ids )[ slots )[ block_tables ............ )    always at the same addresses

    Attributes:
        device: by name, all zeros at first, then as they were when they were brought there.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """Allocate both sides.

        Args:
            arrays: shapes and dtypes by name.
            device: where they are wanted.
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
        """By name, what the next upload brings over. The upload before the last one must be done."""
        return self._hosts[0][1]

    def upload(self, num_rows: int) -> None:
        """Bring to the device what the host has written, and turn to what it wrote before that.

        Args:
            num_rows: of the last array; the others come whole.
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
