"""Chooses the attention kernels that serve a model: the first ones that are correct on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionKernels, AttentionUse
from radixkv.model.attention.refused_attention import FLASHINFER, POINTERS, VARIABLE, refused_names
from radixkv.model.model import Model
from radixkv.model.on_cpu import cpu_candidates
from radixkv.model.on_gpu import attention_candidates, flashinfer_candidate
from radixkv.startup.attention_check import check_attention
from radixkv.startup.attention_trial import try_attention
from radixkv.startup.progress import StartProgress
from radixkv.storage.device_pool import KVShape

_Kernels = TypeVar("_Kernels", bound=AttentionKernels)

_log = logging.getLogger(__name__)


def choose_attention_kernels(
    model: Model,
    kv_shape: KVShape,
    block_size: int,
    attempt: Callable[[str, AttentionUse], None] = try_attention,
    progress: StartProgress | None = None,
) -> AttentionKernels:
    """Choose the attention kernels for a model and its device by short trials; see `try_candidates`.

    Trials run in separate processes on a GPU, and in this process on a CPU. If FlashInfer is installed, supports the
    model and passes its trial, it computes attention in steps that do not run as CUDA graphs.

    Args:
        model: the model that will be served.
        kv_shape: the shape and format of K and V in the pool.
        block_size: tokens per block.
        attempt: tries kernels of a GPU by name; see `try_attention`.
        progress: the progress of the start, which is notified of the chosen kernels; None for none.

    Raises:
        ConfigError: RADIXKV_REFUSED_ATTENTION names unknown kernels.
    """
    progress = progress or StartProgress()
    uses = model.attention_uses(kv_shape, block_size)  # one for each shape of K/V among the layers
    use = uses[0]  # the only one on a GPU
    refused = refused_names("exact" if use.is_exact else "fast")

    def try_on_gpu(name: str) -> None:
        progress.report(f"trying {name}")
        attempt(name, use)

    if model.device.type != "cuda":
        on_cpu = _without_refused(refused, cpu_candidates(use))
        cpu_kernels = try_candidates(on_cpu, lambda name: _check_all(on_cpu[name], uses))
        progress.note(_name_of(cpu_kernels, on_cpu))
        return cpu_kernels
    on_gpu = _without_refused(refused, attention_candidates(use))
    gpu_kernels = try_candidates(on_gpu, try_on_gpu)
    progress.note(_name_of(gpu_kernels, on_gpu))
    triton = gpu_kernels.for_service()
    flashinfer = flashinfer_candidate(use)
    if flashinfer is None:
        return triton
    with_flashinfer = flashinfer.with_triton_kernels(triton)
    candidates: dict[str, AttentionKernels] = {FLASHINFER: with_flashinfer, POINTERS: triton}
    kernels = try_candidates(_without_refused(refused, candidates), try_on_gpu)
    if kernels is with_flashinfer:
        progress.note(FLASHINFER)
    return kernels


def _name_of(kernels: AttentionKernels, candidates: Mapping[str, AttentionKernels]) -> str:
    return next(name for name, candidate in candidates.items() if candidate is kernels)


def _check_all(kernels: AttentionKernels, uses: Iterable[AttentionUse]) -> None:
    for use in uses:
        check_attention(kernels, use)


def _without_refused(refused: Collection[str], candidates: Mapping[str, _Kernels]) -> dict[str, _Kernels]:
    """Remove the candidates that the environment variable refuses, and log a warning for each."""
    for name in candidates:
        if name in refused:
            _log.warning("%s is not used: %s refuses it", name, VARIABLE)
    return {name: kernels for name, kernels in candidates.items() if name not in refused}


def try_candidates(candidates: Mapping[str, _Kernels], attempt: Callable[[str], None]) -> _Kernels:
    """Try kernels until one passes, and log a warning for each that fails.

    Args:
        candidates: kernels by name, the preferred ones first; at least one.
        attempt: called with a name; raises UnsupportedModel if these kernels cannot serve.

    Returns:
        The first kernels that pass, or else the last ones. The last ones are not tried, since there is no alternative:
        `check_model` refuses the model with the reason if they fail.
    """
    *preferred, last = candidates
    for name in preferred:
        try:
            attempt(name)
        except UnsupportedModel as refusal:
            _log.warning("%s is not used: %s", name, refusal)
        else:
            return candidates[name]
    return candidates[last]
