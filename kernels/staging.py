"""What a step's host work makes, on its way to the device."""

from __future__ import annotations

import torch


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
