"""Features of the processor that runs the tests."""

from __future__ import annotations

import pytest

from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly
from radixkv.model.on_cpu import native_library

needs_exact_int8 = pytest.mark.skipif(
    not adds_integers_exactly(),
    reason="this processor saturates sums of int8 products; radixkv refuses int8 weights here",
)


def skip_without_kernels_for(weights: str) -> None:
    """Skip the test if weights of this format need the C++ kernels, and there are none."""
    if weights in QUANTIZED_BITS and native_library() is None:
        pytest.skip("no compiled kernels")
