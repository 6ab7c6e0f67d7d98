"""Exact mode on a GPU: replaces PyTorch's reductions over rows by kernels that compute each row separately."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from radixkv.errors import ConfigError
from radixkv.kernels.gpu.flat_rows import DTYPES
from radixkv.kernels.gpu.norm import rms_norm, row_mean

# Shared memory per block on an H100, H200 or B200, for which the tiles of `linear` are designed. These GPUs have TMA.
_MIN_SHARED_BYTES = 232_448

_TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def require_exact_gpu(device: torch.device) -> None:
    """Refuse a GPU that the kernels do not support, and disable TF32 in this process.

    TF32 rounds the operands of float32 matmuls to a mantissa of 10 bits, so that rotary embeddings of positions beyond
    2,048 would depend on the library.

    Raises:
        ConfigError: the GPU has less shared memory than the kernels need, or the environment makes libraries use TF32.
    """
    override = os.environ.get(_TF32_OVERRIDE, "")
    if override not in ("", "0"):
        raise ConfigError(
            f"model.exactness: expected {_TF32_OVERRIDE} to be 0 or not set for exact, got {override}, which rounds "
            'float32 matmuls; model.exactness = "fast" allows it'
        )
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in the annotations
    if shared_bytes < _MIN_SHARED_BYTES:
        raise ConfigError(
            f"model.exactness: expected a GPU with {_MIN_SHARED_BYTES} bytes of shared memory per block for exact, got "
            f'{gpu.name} with {shared_bytes}; model.exactness = "fast" serves the model there'
        )


def row_functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return replacements of PyTorch's reductions over rows, which fall back to PyTorch's own functions.

    Elementwise functions need no replacement on a GPU, where a thread computes each element.
    """
    return {
        torch.mean: _mean,
        torch.Tensor.mean: _mean,
        functional.rms_norm: _rms_norm,
    }


def _mean(input: torch.Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    reduces_rows = dim in (-1, input.dim() - 1, [-1], (-1,)) and input.dim() > 0
    if not reduces_rows or options or input.dtype not in DTYPES:
        return torch.mean(input, **({} if dim is None else {"dim": dim, "keepdim": keepdim}), **options)
    means = row_mean(input)
    return means if keepdim else means.squeeze(-1)


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if len(normalized_shape) > 1 or eps is None or input.dtype not in DTYPES:
        return functional.rms_norm(input, normalized_shape, weight, eps)
    return rms_norm(input, weight, eps)
