"""Common texts of refusals. Imports nothing, so that a trial in a separate process starts fast."""

from __future__ import annotations

SERVE_FAST = 'model.exactness = "fast" serves the model with answers that depend on what is cached'


def reason_of(error: Exception) -> str:
    """Describe an error of another library in one line.

    >>> reason_of(RuntimeError("PassManager::run failed\\nand a long dump"))
    'RuntimeError: PassManager::run failed'
    """
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
