"""Checks tensors before their addresses are passed to C++, which trusts the dtype and shape that it is given."""

from __future__ import annotations

import torch


def address_of(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return where a tensor's numbers begin.

    Args:
        name: of the argument, for the message.
        tensor: on a CPU.
        dtype, shape: what C++ takes it to have.

    Raises:
        ValueError: it has another dtype or shape, or is not contiguous.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        order = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {tuple(shape)} in {dtype}, "
            f"got a {order} one of shape {tuple(tensor.shape)} in {tensor.dtype}"
        )
    return tensor.data_ptr()
