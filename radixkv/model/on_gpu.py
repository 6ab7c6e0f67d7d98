"""Imports modules that need Triton, when a model runs on a GPU. Only this module imports them.

Triton takes a gigabyte of disk space, and is not available on every platform. A model on a CPU is served without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from radixkv.errors import ConfigError
from radixkv.model.attention.interface import AttentionUse

if TYPE_CHECKING:
    from radixkv.kernels.gpu.linear import Tiles
    from radixkv.model.adapters.low_rank_kernels import LowRankKernels
    from radixkv.model.attention.flashinfer_kernels import FlashInferKernels
    from radixkv.model.attention.triton_kernels import TritonKernels


def require_triton() -> None:
    """Refuse to serve on a GPU without Triton.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "model.device: expected Triton for a model on cuda, got none; install it from a checkout of radixkv: "
            "pip install '.[cuda]'; model.device = \"cpu\" serves without it"
        ) from error


def attention_candidates(use: AttentionUse) -> dict[str, TritonKernels]:
    """Return the attention kernels that are worth a trial on the device of `use`; see `triton_kernels.candidates`."""
    from radixkv.model.attention.triton_kernels import candidates

    if use.device.type != "cuda":
        return candidates(use, (0, 0))
    gpu = torch.cuda.get_device_properties(use.device)
    return candidates(use, (gpu.major, gpu.minor), gpu.multi_processor_count)


def flashinfer_candidate(use: AttentionUse) -> FlashInferKernels | None:
    """Return FlashInfer's attention for a trial; None if it is not installed, or does not support `use`."""
    if use.device.type != "cuda":
        return None
    from radixkv.model.attention.flashinfer_kernels import flashinfer_kernels

    gpu = torch.cuda.get_device_properties(use.device)
    *_, triton_for_any_shape = attention_candidates(use).values()
    return flashinfer_kernels(use, (gpu.major, gpu.minor), triton_for_any_shape)


def fuse_layers(module: nn.Module, *, is_exact: bool) -> Callable[[], AbstractContextManager[None]]:
    """Replace known parts of a model by fused kernels; see `FusedGpuLayers`.

    Returns:
        A function that returns a context manager, inside which the original parts run.
    """
    from radixkv.model.layers.gpu_layers import FusedGpuLayers

    return FusedGpuLayers(module, is_exact=is_exact).originals


def low_rank_kernels(device: torch.device, *, is_exact: bool) -> LowRankKernels:
    """Return the backend that applies adapters; see `LowRankKernels`."""
    from radixkv.model.adapters.low_rank_kernels import LowRankKernels

    return LowRankKernels(device, is_exact=is_exact)


class ExactKernels(NamedTuple):
    """Kernels that compute each row separately on a GPU.

    Attributes:
        linear: computes a linear layer of rows, given a weight, a bias, and the result of `try_tiles`.
        try_tiles: tries a weight and a bias; returns None if the kernel is not batch-invariant on this GPU. See
            `kernels/gpu/linear.py`.
        row_functions: replacements of PyTorch's other reductions over rows.
    """

    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Tiles], torch.Tensor]
    try_tiles: Callable[[torch.Tensor, torch.Tensor | None], Tiles]
    row_functions: Mapping[Callable[..., Any], Callable[..., Any]]


def exact_kernels(device: torch.device) -> ExactKernels:
    """Return the kernels of exact mode.

    Raises:
        ConfigError: the kernels do not support this GPU.
    """
    from radixkv.kernels.gpu.linear import linear, try_tiles
    from radixkv.model.exactness_on_gpu import require_exact_gpu, row_functions

    require_exact_gpu(device)

    def tiled_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
        return linear(rows, weight, bias, has_large_tiles=tiles == "both sizes")

    return ExactKernels(tiled_linear, try_tiles, row_functions())
