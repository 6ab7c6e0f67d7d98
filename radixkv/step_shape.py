"""Which steps are recorded, and how much room each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from radixkv.kernels.attention_plan import usual_partials

if TYPE_CHECKING:  # Triton is not there on every platform
    from radixkv.triton_kernels import TritonKernels

# What launches cost does not show in steps of more tokens, since the device takes longer to compute them.
_MOST_TOKENS = 128
_LEAST_PROMPT_TOKENS = 16

# Requests in the steps that answer short prompts alone: each has its row of logits, which is not for free.
_FEW_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for the tokens of a step and for the plans of its attention.

    Attributes:
        num_tokens: new tokens, all requests together.
        num_requests: requests, and rows of logits.
        tile_rows: of each plan.
        num_tiles: of each plan.
        num_partials: partial results of each plan and KV head.
    """

    num_tokens: int
    num_requests: int
    tile_rows: int
    num_tiles: int
    num_partials: int

    @property
    def num_items(self) -> int:
        """Items of work of each plan."""
        return self.num_tiles + self.num_partials


def step_shapes(
    kernels: TritonKernels,
    dtype: torch.dtype,
    num_query_heads: int,
    num_kv_heads: int,
    *,
    max_tokens: int,
    max_requests: int,
) -> list[StepShape]:
    """List what is worth being recorded: decoding, short prompts, and both together.

    Args:
        kernels: those that attend; they say how large their tiles are.
        dtype: of the queries.
        num_query_heads: most that a layer has.
        num_kv_heads: of the pool.
        max_tokens: of a step.
        max_requests: of a step.

    Returns:
        Shapes, those with the least room first: doubling from 1 request to 64 that have a token each, and from 16
        tokens to 128 with few requests and with many.
    """
    group_size = num_query_heads // num_kv_heads

    def shape(num_tokens: int, num_requests: int, most_query_tokens: int) -> StepShape:
        tile_rows = kernels.tile_rows(group_size * most_query_tokens, dtype)
        num_tiles = num_requests + num_tokens * group_size // tile_rows
        return StepShape(num_tokens, num_requests, tile_rows, num_tiles, usual_partials(num_requests, num_kv_heads))

    max_tokens, max_requests = min(max_tokens, _MOST_TOKENS), min(max_requests, _MOST_TOKENS // 2)
    decoding = [shape(number, number, 1) for number in _doubling(1, max_requests)]
    prompts = [
        shape(number, min(number, most, max_requests), number)
        for number in _doubling(_LEAST_PROMPT_TOKENS, max_tokens)
        for most in (_FEW_REQUESTS, max_requests)
    ]
    return sorted(
        dict.fromkeys(decoding + prompts), key=lambda each: (each.num_tokens, each.num_requests, each.tile_rows)
    )


def _doubling(least: int, most: int) -> list[int]:
    numbers = []
    while least <= most:
        numbers.append(least)
        least *= 2
    return numbers
