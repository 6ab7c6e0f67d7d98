"""Abilities of the processor that runs the tests."""

from __future__ import annotations

import pytest

from radixkv.kernels.cpu.int8_linear import adds_integers_exactly

needs_exact_int8 = pytest.mark.skipif(
    not adds_integers_exactly(), reason="this processor cuts sums of products of 8 bits off; radixkv refuses them here"
)
