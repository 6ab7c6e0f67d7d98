"""Abilities of the processor that runs the tests."""

from __future__ import annotations

import pytest

from radixkv.kernels.cpu.int8_linear import adds_integers_exactly

needs_exact_int8 = pytest.mark.skipif(
    not adds_integers_exactly(),
    reason="this processor saturates sums of int8 products; radixkv refuses int8 weights here",
)
