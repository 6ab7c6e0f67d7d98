"""Copies the tensors that the host prepares for a step to the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

_ALIGNMENT_BYTES = 16  # kernels may assume that the address of each array is a multiple of this


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from the host to a device.

    For a GPU, the tensor is copied through pinned memory, so that the host does not wait: a copy from pageable memory
    waits for everything that was launched before it. PyTorch does not reuse the pinned memory before the copy is done.

    Args:
        tensor: any shape. Do not change it afterwards, because for a CPU it is returned itself.
        device: device of the result.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class StagedArrays:
    """Arrays in one region of memory that the host fills for every step, so that one copy uploads all of them.

        host      [ input_ids )[ slots )[ block_tables ............ )    pinned; two regions alternate, so that
                     │ upload                                            one is filled while the other is uploaded
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
        last_shape, last_dtype = list(arrays.values())[-1]
        self._last_start = sum(num_bytes[:-1])
        self._last_row_bytes = math.prod(last_shape[1:]) * last_dtype.itemsize
        regions = [torch.zeros(sum(num_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self._device_region = torch.zeros_like(regions[0], device=device)
        self.device = _views(self._device_region, arrays, num_bytes)
        self._hosts = deque(
            (region, _views(region, arrays, num_bytes)) for region in regions
        )  # the one to fill next comes first

    @property
    def host(self) -> dict[str, torch.Tensor]:
        """The arrays that the next `upload` copies, by name.

        The upload before the last one read the same memory. Write to it only after that upload is done.
        """
        return self._hosts[0][1]

    def upload(self, num_rows: int) -> None:
        """Copy the host's arrays to the device, without waiting.

        From then on `host` is the other region, which still contains what was written for the previous upload.

        Args:
            num_rows: number of rows of the last array to copy. The other arrays are copied as a whole.
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
    array_regions = torch.split(region, list(num_bytes))
    return {
        name: array_region[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for array_region, (name, (shape, dtype)) in zip(array_regions, arrays.items(), strict=True)
    }
