"""What refusals of a model have in common. Needs nothing but Python: trials import it in a process of their own."""

from __future__ import annotations

SERVE_FAST = 'model.exactness = "fast" serves the model with answers that depend on what is cached'


def reason_of(error: Exception) -> str:
    """An error of somebody else's code in one line.

    >>> reason_of(RuntimeError("PassManager::run failed\\nand a long dump"))
    'RuntimeError: PassManager::run failed'
    """
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
