"""The kernels that may serve a model on a CPU, and copies in C++."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native import gemm
from radixkv.kernels.native.compiler import NotCompiled
from radixkv.kernels.native.copies import NativeCopies
from radixkv.kernels.native.library import DTYPE_CODES, load_library
from radixkv.model.attention.interface import AttentionKernels, AttentionUse
from radixkv.model.attention.native_kernels import NativeKernels
from radixkv.model.attention.refused_attention import NATIVE, TORCH
from radixkv.model.attention.torch_kernels import TorchKernels

_log = logging.getLogger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the C++ kernels for this machine, compiled if necessary; None if there are none.

    The kernels become a GEMM backend. If there are none, one warning gives the reason, the cost and the remedy.
    """
    try:
        library = load_library(cache_directory())
    except NotCompiled as reason:
        _log.warning("no compiled kernels, so models on the CPU run 2 to 3 times slower: %s", reason)
        return None
    gemm.use(library)
    return library


def native_copies() -> NativeCopies | None:
    """Return the copy functions of the C++ kernels; None if there are none."""
    library = native_library()
    return None if library is None else NativeCopies(library)


def cpu_candidates(use: AttentionUse) -> dict[str, AttentionKernels]:
    """Return the kernels that may serve, by name, the preferred ones first. Quantized pools need PyTorch's attention.

    Args:
        use: what a model requires, on a CPU.
    """
    candidates: dict[str, AttentionKernels] = {TORCH: TorchKernels()}
    library = native_library() if use.shape.dtype in DTYPE_CODES else None
    return candidates if library is None else {NATIVE: NativeKernels(library), **candidates}
