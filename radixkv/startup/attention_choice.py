"""Which attention kernels serve a model: the first that are right on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionKernels

_Kernels = TypeVar("_Kernels", bound=AttentionKernels)

_log = logging.getLogger(__name__)


def choose_attention(candidates: Mapping[str, _Kernels], attempt: Callable[[str], None]) -> _Kernels:
    """Try kernels until some are right, and log a warning for each that are not.

    Args:
        candidates: kernels by name, the preferred ones first; at least one.
        attempt: given a name, raises UnsupportedModel if these kernels can't serve.

    Returns:
        The first that can, or else the last, which are not tried: nothing is left to take in their place, and
        `check_model` refuses the model with the reason.
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
