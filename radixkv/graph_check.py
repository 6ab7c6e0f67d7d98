"""Drops recorded steps that do not answer as the model does."""

from __future__ import annotations

import logging

import numpy as np
import torch

from radixkv.attention import AttentionKernels
from radixkv.forward import LOGITS_TOLERANCE, Chunk, StepInputs, compute_step, lay_out
from radixkv.kv_storage import KVStorage
from radixkv.model import Model
from radixkv.step_graphs import StepGraphs
from radixkv.step_shape import StepShape

# Cached tokens before those that are computed, if sequences may be so long: more than one split has.
_PREFIX_TOKENS = 4608

_FIRST_BLOCK = np.zeros(1, dtype=np.int32)

_log = logging.getLogger(__name__)


def drop_wrong_graphs(
    graphs: StepGraphs, model: Model, storage: KVStorage, kernels: AttentionKernels, max_sequence_tokens: int
) -> None:
    """Compute a step with each graph and without it, and drop those that answer otherwise, with a warning.

    In exact mode every bit of logits and K/V counts. The steps have a token less than there is room for. Graphs that
    are too large for the pool are dropped, too: no such step can come.

    Args:
        graphs: recorded over `storage`.
        model: the weights.
        storage: the K/V memory; what is in it is lost.
        kernels: what works on it.
        max_sequence_tokens: of the longest sequence.
    """
    num_tokens = _PREFIX_TOKENS + max(shape.num_tokens for shape in graphs.shapes)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens).astype("<u4").tobytes()
    prefix = Chunk(tokens, 0, min(storage.block_size, max_sequence_tokens), _FIRST_BLOCK, None, wants_logits=False)
    compute_step(model, storage.pool, kernels, lay_out([prefix], storage.block_size).to(model.device))
    for shape in graphs.shapes:
        chunks = _chunks(shape, tokens, storage, max_sequence_tokens)
        if chunks is None or not _is_right(shape, lay_out(chunks, storage.block_size), graphs, model, storage, kernels):
            graphs.drop(shape)


def _is_right(
    shape: StepShape,
    inputs: StepInputs,
    graphs: StepGraphs,
    model: Model,
    storage: KVStorage,
    kernels: AttentionKernels,
) -> bool:
    num_rows = len(inputs.logit_rows)
    blocks = storage.pool.blocks[: int(inputs.batch.block_tables.max()) + 1]
    blocks[1:] = 0xFF  # NaN, or scales that are NaN
    outputs = graphs.replay(shape, inputs)
    assert outputs is not None, "a step has no room in the graph that was made for it"
    got, got_blocks = outputs.logits[:num_rows].clone(), blocks.clone()
    blocks[1:] = 0xFF
    expected = compute_step(model, storage.pool, kernels, inputs.to(model.device)).logits
    if model.is_exact:
        is_right = torch.equal(got, expected) and torch.equal(got_blocks, blocks)
    else:
        is_right = bool((got - expected).norm() <= LOGITS_TOLERANCE[model.kv_shape.dtype] * expected.norm())
    if not is_right:
        _log.warning("a recorded step of %d tokens is not used: its answers differ", shape.num_tokens)
    return is_right


def _chunks(shape: StepShape, tokens: bytes, storage: KVStorage, max_sequence_tokens: int) -> list[Chunk] | None:
    """A step that nearly fills a shape: one longer request and others of a token each, after the first block's tokens,
    over and over. None if the pool has too few blocks.
    """
    block_size = storage.block_size
    num_tokens = max(1, shape.num_tokens - 1)
    num_others = min((shape.num_requests - 1) // 2, num_tokens - 1)
    query_lens = [num_tokens - num_others, *[1] * num_others]
    prefix_blocks = max(0, min(_PREFIX_TOKENS, max_sequence_tokens - query_lens[0])) // block_size
    chunks, num_blocks = [], 1
    for query_len in query_lens:
        own_blocks = np.arange(num_blocks, num_blocks - (-query_len // block_size), dtype=np.int32)
        num_blocks += len(own_blocks)
        start = prefix_blocks * block_size
        block_ids = np.concatenate((np.zeros(prefix_blocks, dtype=np.int32), own_blocks))
        chunks.append(Chunk(tokens, start, start + query_len, block_ids, None, wants_logits=True))
    return chunks if num_blocks <= storage.num_blocks else None
