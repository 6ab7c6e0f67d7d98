"""The shapes of steps that are captured as CUDA graphs: which steps are captured, and the capacity of each graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.model.attention.interface import PlanningKernels

# Minimum number of tokens of a captured step with prompts, and maximum number of requests of any captured step.
_MIN_PROMPT_TOKENS = 16
_MAX_REQUESTS = 64

# Minimum and maximum of `max_captured_tokens`.
_CAPTURED_TOKENS = (128, 512)

# Estimates: 25 launches per layer take the host 30 us each, and a GPU performs 4e14 operations per second. Computing a
# token takes two operations per parameter.
_LAUNCH_S_PER_LAYER = 25 * 30e-6
_OPERATIONS_PER_S = 4e14

# Requests in captured steps that are only for short prompts. Each request has a row of logits, which costs time.
_FEW_REQUESTS = 4

# Partial results for longer contexts in exact mode, where a split has a fixed length: 80 are enough for 16 requests
# with 10,000 tokens of context or for one request with 131,072, and 320 for four times as many requests. Unused room
# costs time, since programs without work are launched as well.
_EXACT_PARTIALS = (80, 320)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The capacity of a captured step: its tokens, and the plans of its attention. Shapes are ordered by their fields.

    Attributes:
        num_tokens: new tokens of all requests together.
        num_requests: requests, and rows of logits.
        num_partials: work items of each plan that produce partial results, each for at most `tile_rows` rows.
        tile_rows: rows of a tile in each plan.
        num_tiles: tiles of each plan.
    """

    num_tokens: int
    num_requests: int
    num_partials: int
    tile_rows: int
    num_tiles: int

    @property
    def num_items(self) -> int:
        """Number of work items of each plan."""
        return self.num_tiles + self.num_partials

    @property
    def num_partial_rows(self) -> int:
        """Rows of partial results of each plan and KV head."""
        return self.num_partials * self.tile_rows

    def has_room(self, batch: PagedBatch) -> bool:
        """Whether the tokens and requests of a step fit."""
        return batch.num_tokens <= self.num_tokens and batch.num_requests <= self.num_requests

    def has_room_for(self, plan: AttentionPlan) -> bool:
        """Whether a plan whose tiles have `tile_rows` rows fits."""
        return (
            len(plan.work) <= self.num_items
            and len(plan.merges) <= self.num_tiles
            and plan.num_partial_rows <= self.num_partial_rows
        )


def max_captured_tokens(num_parameters: int, num_layers: int) -> int:
    """Return the number of tokens of the largest step that is worth capturing, 128 to 512.

    It is the largest power of two up to which launching the kernels takes at least as long as computing.

    >>> [max_captured_tokens(*model) for model in ((500_000_000, 24), (8_000_000_000, 32), (70_000_000_000, 80))]
    [512, 512, 128]

    Args:
        num_parameters: number of parameters of the model.
        num_layers: layers of the model.
    """
    lowest, highest = _CAPTURED_TOKENS
    max_tokens = num_layers * _LAUNCH_S_PER_LAYER * _OPERATIONS_PER_S / (2 * num_parameters)
    return next((size for size in reversed(_doubling_sizes(lowest, highest)) if size <= max_tokens), lowest)


def step_shapes(
    kernels: PlanningKernels,
    dtype: torch.dtype,
    num_query_heads: int,
    num_kv_heads: int,
    *,
    max_tokens: int,
    max_requests: int,
) -> list[StepShape]:
    """List the shapes that are worth capturing: decoding, short prompts, and both together.

    Args:
        kernels: the attention kernels, which choose the size of their tiles.
        dtype: dtype of the queries.
        num_query_heads: maximum number of query heads of a layer.
        num_kv_heads: KV heads of the pool.
        max_tokens: maximum number of tokens of a captured step.
        max_requests: maximum number of requests of a step.

    Returns:
        Shapes in order, with doubling sizes: 1 to at most 64 requests with one token each, and 16 to `max_tokens`
        tokens with few and with many requests. In exact mode each is captured for up to three lengths of context.
    """
    group_size = num_query_heads // num_kv_heads
    max_requests = min(max_requests, _MAX_REQUESTS)
    sizes = []  # tokens, requests, and maximum number of tokens per request
    for num_requests in _doubling_sizes(1, max_requests):
        sizes.append((num_requests, num_requests, 1))
    for num_tokens in _doubling_sizes(_MIN_PROMPT_TOKENS, max_tokens):
        sizes.append((num_tokens, min(num_tokens, _FEW_REQUESTS, max_requests), num_tokens))
        sizes.append((num_tokens, min(num_tokens, max_requests), num_tokens))
    shapes = set()
    for (num_tokens, num_requests, max_query_len), min_partials in itertools.product(sizes, (0, *_EXACT_PARTIALS)):
        tile_rows = kernels.tile_rows(group_size * max_query_len, dtype)
        num_tiles = num_requests + num_tokens * group_size // tile_rows
        num_partials = kernels.max_partials(num_requests, num_kv_heads, tile_rows)
        if kernels.is_exact:
            num_partials = max(num_partials, min_partials)
        shapes.add(StepShape(num_tokens, num_requests, num_partials, tile_rows, num_tiles))
    return sorted(shapes)


def _doubling_sizes(smallest: int, largest: int) -> list[int]:
    """List `smallest` and its doubles up to `largest`."""
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= 2
    return sizes
