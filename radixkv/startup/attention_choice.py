"""Chooses the attention kernels that serve a model: the first ones that are correct on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

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
        on_cpu = cpu_candidates(use)
        name = try_candidates(_without_refused(refused, on_cpu), lambda name: _check_all(on_cpu[name], uses))
        progress.note(name)
        return on_cpu[name]
    on_gpu = attention_candidates(use)
    name = try_candidates(_without_refused(refused, on_gpu), try_on_gpu)
    progress.note(name)
    triton = on_gpu[name].for_service()
    flashinfer = flashinfer_candidate(use)
    if flashinfer is None:
        return triton
    candidates: dict[str, AttentionKernels] = {FLASHINFER: flashinfer.with_triton_kernels(triton), POINTERS: triton}
    name = try_candidates(_without_refused(refused, candidates), try_on_gpu)
    if name == FLASHINFER:
        progress.note(name)
    return candidates[name]


def _check_all(kernels: AttentionKernels, uses: Iterable[AttentionUse]) -> None:
    for use in uses:
        check_attention(kernels, use)


def _without_refused(refused: Collection[str], names: Iterable[str]) -> list[str]:
    """Remove the kernels that the environment variable refuses, and log a warning for each."""
    remaining = []
    for name in names:
        if name in refused:
            _log.warning("%s is not used: %s refuses it", name, VARIABLE)
        else:
            remaining.append(name)
    return remaining


def try_candidates(names: Iterable[str], attempt: Callable[[str], None]) -> str:
    """Try kernels until one passes, and log a warning for each that fails.

    Args:
        names: names of kernels, the preferred ones first; at least one.
        attempt: called with a name; raises UnsupportedModel if these kernels cannot serve.

    Returns:
        The name of the first kernels that pass, or else of the last ones. The last ones are not tried, since there is
        no alternative: `check_model` refuses the model with the reason if they fail.
    """
    *preferred, last = names
    for name in preferred:
        try:
            attempt(name)
        except UnsupportedModel as refusal:
            _log.warning("%s is not used: %s", name, refusal)
        else:
            return name
    return last
