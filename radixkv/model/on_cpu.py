"""The attention kernels that may serve a model on a CPU."""

from __future__ import annotations

import logging

import torch

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.library import KINDS, NotCompiledError, load_library
from radixkv.model.attention.interface import AttentionKernels, AttentionUse
from radixkv.model.attention.native_kernels import NativeKernels
from radixkv.model.attention.refused_attention import NATIVE, TORCH
from radixkv.model.attention.torch_kernels import TorchKernels

_log = logging.getLogger(__name__)


def cpu_candidates(use: AttentionUse) -> dict[str, AttentionKernels]:
    """Return the kernels that may serve, by name, the preferred ones first. Logs why there are no native ones.

    Torch's attention serves quantized pools, and bfloat16 where a processor has AMX, which it multiplies with.

    Args:
        use: the demands of a model on a CPU.
    """
    candidates: dict[str, AttentionKernels] = {TORCH: TorchKernels()}
    has_amx = use.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if use.shape.dtype not in KINDS or has_amx:
        return candidates
    try:
        return {NATIVE: NativeKernels(load_library(cache_directory())), **candidates}
    except NotCompiledError as reason:
        _log.info("%s is not used: %s", NATIVE, reason)
        return candidates
