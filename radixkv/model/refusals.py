"""Common texts of refusals. Imports only the standard library, so that a trial in a separate process starts fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVE_FAST = 'model.exactness = "fast" serves the model with answers that depend on what is cached'


def misfits(info: Mapping[str, Any]) -> str:
    """Describe the weights that do not fit a model.

    >>> misfits({"missing_keys": {"b", "a"}, "unexpected_keys": set()})
    "missing_keys ['a', 'b']"

    Args:
        info: the loading info of `from_pretrained`.

    Returns:
        The kinds, each with up to three names; empty if all weights fit.
    """
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    return ", ".join(f"{kind} {sorted(info[kind])[:3]}" for kind in kinds if info.get(kind))


def reason_of(error: Exception) -> str:
    """Describe an error of another library in one line.

    >>> reason_of(RuntimeError("PassManager::run failed\\nand a long dump"))
    'RuntimeError: PassManager::run failed'
    """
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
