"""Turns what a pool stores into numbers, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def stored_numbers(values, dtype: tl.constexpr, NUMBERS_PER_VALUE: tl.constexpr, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn what the pool stores, `[rows, dims // NUMBERS_PER_VALUE]`, into `dtype` `[rows, dims]`, exactly.

    Through float32, since the interpreter does not convert integers to bfloat16.
    """
    if NUMBERS_PER_VALUE == 8:
        halves = tl.join(values, values >> 16)
        evens = tl.join(_nibble(halves, 0), _nibble(halves, 8))
        odds = tl.join(_nibble(halves, 4), _nibble(halves, 12))
        values = tl.reshape(tl.join(evens, odds), (values.shape[0], values.shape[1] * NUMBERS_PER_VALUE))
    else:
        if NUMBERS_PER_VALUE == 2:
            values = tl.interleave((values << 4) >> 4, values >> 4)
        if values.dtype == dtype:
            return values
        values = values.to(tl.float32)
    if TILE_ROWS == 16:
        # A sum of one number, through which the compiler does not look: else small products load V in smaller pieces.
        values = tl.sum(tl.reshape(values, (values.shape[0], values.shape[1], 1)), 2)
    return values.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _nibble(words, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the signed four bits from a bit on, as float32.

    They become the last digits of a float between 2^23 and 2^24: two instructions, where a conversion takes four.
    """
    bits = (words & (15 << SHIFT)) ^ (0x4B000000 + (8 << SHIFT))
    return bits.to(tl.float32, bitcast=True) * (1.0 / (1 << SHIFT)) - (8388608.0 / (1 << SHIFT) + 8.0)
