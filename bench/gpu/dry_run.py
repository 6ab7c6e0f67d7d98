"""Runs Triton kernels on a CPU through Triton's interpreter, as the tests do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on the CPU inside a `with` statement."""
    import pytest

    from tests.kernels.gpu.interpreter import interpret_kernels

    with pytest.MonkeyPatch.context() as patch:
        interpret_kernels(patch)
        yield
