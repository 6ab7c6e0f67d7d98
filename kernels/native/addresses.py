"""Checks tensors before their addresses are passed to C++, which does not check dtypes and shapes."""

from __future__ import annotations

import torch


def address_of(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a tensor's data.

    Args:
        name: name of the argument, for the error message.
        tensor: a tensor on the CPU.
        dtype, shape: the dtype and shape that the C++ code expects.

    Raises:
        ValueError: the tensor has another dtype or shape, or is not contiguous.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        order = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {tuple(shape)} in {dtype}, "
            f"got a {order} one of shape {tuple(tensor.shape)} in {tensor.dtype}"
        )
    return tensor.data_ptr()
