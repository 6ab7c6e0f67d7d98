"""Launches every kernel once before serving, so that no request waits for a compilation.

A kernel is compiled separately for each number of rows of a tile, for each dtype, and for strides that are multiples of
16 and other strides. A compilation takes 0.6 to 0.8 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from radixkv.blocks import BlockCopy
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.model.attention.interface import PlanningKernels
from radixkv.model.model import Model
from radixkv.startup.pool_size import first_block_chunk
from radixkv.storage.device_pool import KVStorage

# Numbers of packed rows of a tile: those that `kernels/gpu/attention_plan.py` chooses from.
_TILE_ROWS = (16, 64, 128)

# Kernels are specialized for strides that are multiples of this.
_ALIGNMENT = 16

# Cached tokens of the first request of a step: more than a split has in any mode, so that results of splits are merged.
_CACHED_TOKENS = 4608


def launch_all(model: Model, storage: KVStorage, kernels: Sequence[PlanningKernels], max_sequence_tokens: int) -> None:
    """Compute small steps that together launch every kernel that a step without a CUDA graph may launch.

    Args:
        model: the weights.
        storage: the K/V memory; the contents of its first block are lost.
        kernels: all variants of the operations on the pool.
        max_sequence_tokens: tokens of the longest sequence.
    """
    group_sizes = {kind.num_query_heads // model.kv_shape.num_kv_heads for kind in model.attention_kinds}
    for variant in kernels:
        runner = Runner(model, storage, variant)  # without graphs
        for query_lens in _steps(sorted(group_sizes)):
            runner.run(_chunks(query_lens, storage.block_size, max_sequence_tokens))


def _steps(group_sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield steps as numbers of new tokens per request.

    The first step has a single token, since a tensor of one token has special strides. Then there are two steps for
    each group size and tile: the total number of tokens is a multiple of 16 in one, and odd in the other.
    """
    yield [1]
    for group_size in group_sizes:
        for tile_rows in _TILE_ROWS:
            max_tokens = max(1, tile_rows // group_size)  # the tokens of a request whose rows fit into a tile
            yield [max_tokens] * (_ALIGNMENT // math.gcd(_ALIGNMENT, max_tokens))
            yield [max_tokens] if max_tokens % 2 else [max_tokens, 1]


def _chunks(query_lens: Sequence[int], block_size: int, max_sequence_tokens: int) -> list[Chunk]:
    """Create a step that uses the first block for all positions, and first copies this block onto itself."""
    chunks: list[Chunk] = []
    for query_len in query_lens:
        num_tokens = min(query_len, max_sequence_tokens)
        end = min(max_sequence_tokens, num_tokens + (0 if chunks else _CACHED_TOKENS))
        chunks.append(first_block_chunk(end - num_tokens, end, block_size))
    chunks[0] = dataclasses.replace(chunks[0], copy=BlockCopy(0, 0))
    return chunks
