"""Generates cancellation-sensitive inputs, which reveal the summation order even in half precision.

Values come in pairs whose products cancel. Only the rounding errors of the partial sums remain, and they depend on the
order of summation:

    row     [  3.1    0.7    3.1    0.7  ]
    weight  [  2.5   -1.9   -2.5    1.9  ]      exactly 0; in fused float32 operations -3e-7 to 3e-7
"""

from __future__ import annotations

from typing import Literal

import torch

CANCELLING_SCALE = 100.0
NUM_CANCELLING_TOKENS = 128

# Random numbers are scaled by 1 to 64, so that rounding errors are large, and float16 does not overflow.
_LARGEST_EXPONENT = 6
_BIAS_SCALE = 1e-4  # about as large as the remaining rounding errors


def sensitive_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Generate rows, a weight and a bias for which a linear layer returns the bias, except for rounding errors.

    Args:
        weight: `[out_features, in_features]`; the new weight has its shape, dtype, device and strides.
        bias: `[out_features]`, or None for none.
        num_rows: number of rows.

    Returns:
        The rows `[num_rows, in_features]`, the new weight, and a new bias.
    """
    out_features, in_features = weight.shape
    generator = torch.Generator().manual_seed(0)
    # The features of each pair. With an odd number of features, one remains 0.
    first, second = torch.randperm(in_features, generator=generator)[: in_features // 2 * 2].chunk(2)
    rows = torch.zeros(num_rows, in_features)
    rows[:, first] = rows[:, second] = _scaled_numbers(generator, num_rows, len(first))
    weight_row = torch.zeros(in_features)
    weight_row[first] = _scaled_numbers(generator, len(first))
    weight_row[second] = -weight_row[first]
    scales = torch.randn(out_features, 1, generator=generator)
    new_weight = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    torch.mul(scales.to(weight), weight_row.to(weight), out=new_weight)
    new_bias = None if bias is None else (_BIAS_SCALE * torch.randn(out_features, generator=generator)).to(bias)
    return rows.to(weight), new_weight, new_bias


def sensitive_attention(
    cancelling_sums: Literal["values", "scores"],
    num_tokens: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Generate a query, a key and a value for attention whose sums cancel.

    Args:
        cancelling_sums: `values`: all keys are equal, and the values of each group of `NUM_CANCELLING_TOKENS` tokens
            add up to 0. `scores`: the terms of every score add up to 0; with the scale `CANCELLING_SCALE`, their
            rounding errors change the result.
        num_tokens, num_query_heads, num_kv_heads, head_dim: shape; `head_dim` is at least 2.

    Returns:
        Float32 `[num_tokens, heads, head_dim]` each, exactly representable in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    value = _scaled_numbers(generator, num_tokens, num_kv_heads, head_dim)
    query = torch.zeros(num_tokens, num_query_heads, head_dim)
    key = torch.zeros(num_tokens, num_kv_heads, head_dim)
    if cancelling_sums == "values":
        token_groups = torch.split(torch.arange(num_tokens), NUM_CANCELLING_TOKENS)
        shuffled = torch.cat([group[torch.randperm(len(group), generator=generator)] for group in token_groups])
        paired_tokens = shuffled[: num_tokens // 2 * 2]  # the two tokens of each pair are adjacent
        value[paired_tokens[1::2]] = -value[paired_tokens[::2]]
    else:
        # The dimensions of each pair. With an odd number of dimensions, one remains 0.
        first, second = torch.randperm(head_dim, generator=generator)[: head_dim // 2 * 2].chunk(2)
        query[:, :, first] = _scaled_numbers(generator, num_tokens, num_query_heads, len(first))
        query[:, :, second] = query[:, :, first]
        key[:, :, first] = _scaled_numbers(generator, num_tokens, num_kv_heads, len(first))
        key[:, :, second] = -key[:, :, first]
    return query.bfloat16().float(), key.bfloat16().float(), value.bfloat16().float()


def _scaled_numbers(generator: torch.Generator, *size: int) -> torch.Tensor:
    exponents = torch.randint(_LARGEST_EXPONENT + 1, size, generator=generator)
    return torch.randn(size, generator=generator) * torch.exp2(exponents)
