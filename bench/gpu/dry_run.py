"""Triton kernels on a CPU, as the tests run them: through the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on the CPU inside the block."""
    import pytest

    from tests.kernels.gpu.interpreter import interpret_kernels

    with pytest.MonkeyPatch.context() as patch:
        interpret_kernels(patch)
        yield
