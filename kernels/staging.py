"""What a step's host work makes, on its way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """Bring an array to a device.

    A GPU gets it through pinned memory, so that the host goes on at once: from pageable memory a copy waits for all
    that was launched before it. Torch does not use the pinned memory again before the copy is done.

    Args:
        array: any shape; not to be changed afterwards, since on a CPU the tensor shares its memory.
        device: where the tensor is to be.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
