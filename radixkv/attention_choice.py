"""Which attention kernels serve a model: the first that are right on this machine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from radixkv.attention import AttentionKernels
from radixkv.attention_check import AttentionKind, check_attention
from radixkv.errors import UnsupportedModel
from radixkv.kv_storage import KVShape

_log = logging.getLogger(__name__)


def choose_attention(
    candidates: Mapping[str, AttentionKernels],
    kinds: Collection[AttentionKind],
    dtype: torch.dtype,
    shape: KVShape,
    block_size: int,
    device: torch.device,
    *,
    is_exact: bool,
) -> AttentionKernels:
    """Try kernels until some pass `check_attention`, and log a warning for each that do not.

    Args:
        candidates: kernels by name, the preferred ones first; at least one.
        kinds: of the model's layers, each of which they have to pass.
        dtype: see `check_attention`, also for all that follow.

    Returns:
        The first that pass, or else the last, which are not tried: nothing is left to take in their place, and
        `check_model` refuses the model with the reason.
    """
    *preferred, last = candidates
    for name in preferred:
        try:
            for kind in kinds:
                check_attention(candidates[name], kind, dtype, shape, block_size, device, is_exact=is_exact)
        except UnsupportedModel as refusal:
            _log.warning("%s is not used: %s", name, refusal)
        else:
            return candidates[name]
    return candidates[last]
