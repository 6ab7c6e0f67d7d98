"""Drops CUDA graphs whose results differ from those of the same steps launched kernel by kernel."""

from __future__ import annotations

import logging

import numpy as np
import torch

from radixkv.compute.forward import Chunk, lay_out, pack_tokens
from radixkv.compute.graphs.graphs import StepGraphs
from radixkv.compute.graphs.shapes import StepShape
from radixkv.compute.runner import Runner
from radixkv.model.attention.interface import AttentionKernels
from radixkv.model.model import Model
from radixkv.model.report import Report, report_nothing
from radixkv.startup.model_check import LOGITS_TOLERANCE
from radixkv.storage.device_pool import KVStorage

# Cached tokens before the computed ones. The first number exceeds the keys of a split, even in exact mode. A smaller
# number is used only if the larger ones do not fit.
_PREFIX_TOKENS = (4608, 2304, 128)

_FIRST_BLOCK = np.zeros(1, dtype=np.int32)

_log = logging.getLogger(__name__)


def drop_wrong_graphs(
    graphs: StepGraphs,
    model: Model,
    storage: KVStorage,
    kernels: AttentionKernels,
    max_sequence_tokens: int,
    report: Report = report_nothing,
) -> None:
    """Compute a step with each graph and without it, and drop graphs whose results differ, with a warning.

    In exact mode logits and K/V are compared bit for bit, on the device; in fast mode only the logits are compared,
    with a tolerance. Each step has at least one token less than its graph has room for, unless that is a single token.
    Graphs that cannot be checked, because the pool has too few blocks for example, are also dropped.

    Args:
        graphs: steps captured over `storage`.
        model: the weights.
        storage: the K/V memory; its contents are lost.
        kernels: the operations on the pool.
        max_sequence_tokens: tokens of the longest sequence.
        report: called with the number of each graph that is checked.
    """
    num_tokens = max(_PREFIX_TOKENS) + max(shape.num_tokens for shape in graphs.shapes)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens).astype("<u4").tobytes()
    prefix = Chunk(tokens, 0, min(storage.block_size, max_sequence_tokens), _FIRST_BLOCK, None, wants_logits=False)
    runner = Runner(model, storage, kernels)  # without graphs
    runner.run([prefix])
    shapes = tuple(graphs.shapes)
    for index, shape in enumerate(shapes, 1):
        report(f"step {index} of {len(shapes)}")
        try:
            reason = _reason_to_drop(shape, tokens, graphs, runner, max_sequence_tokens)
        except torch.OutOfMemoryError:
            reason = "there is no memory to check it"
        if reason:
            graphs.drop(shape)
            _log.warning("a captured step is not used, because %s: %s", reason, shape)


def _reason_to_drop(
    shape: StepShape, tokens: bytes, graphs: StepGraphs, runner: Runner, max_sequence_tokens: int
) -> str:
    """Compute a step with a graph and without it. Returns why the graph must be dropped; empty if it is correct."""
    storage = runner.storage
    for prefix_tokens in _PREFIX_TOKENS:
        chunks = _chunks(shape, tokens, storage.block_size, prefix_tokens, max_sequence_tokens)
        layout = lay_out(chunks, storage.block_size)
        num_blocks = int(layout.batch.block_tables.max()) + 1
        if num_blocks > storage.num_blocks:
            return "the pool has too few blocks to check it"
        storage.pool.blocks[1:num_blocks] = 0xFF  # NaN, or scales that are NaN
        replay = graphs.prepare_as(shape, layout)
        if replay is not None:
            logits = replay(pack_tokens(chunks)).logits[: len(chunks)]
            return _compare_with_launches(logits.clone(), num_blocks, chunks, runner)
    return "there is no room for a step to check it"


def _compare_with_launches(logits: torch.Tensor, num_blocks: int, chunks: list[Chunk], runner: Runner) -> str:
    """Compute a replayed step again, kernel by kernel. Returns why the graph must be dropped; empty if it is correct.

    Args:
        logits: logits of the replayed step.
        num_blocks: number of blocks at the start of the pool that the step may have written.
        chunks: the step.
        runner: computes the step kernel by kernel.
    """
    model, pool = runner.model, runner.storage.pool.blocks
    blocks = pool[:num_blocks]
    replayed_blocks = None
    if model.is_exact:
        # A copy is kept in the next blocks of the pool, if there are enough: the device may have no other free memory.
        spare = pool[num_blocks : 2 * num_blocks]
        replayed_blocks = spare if len(spare) == num_blocks else torch.empty_like(blocks, device="cpu")
        replayed_blocks.copy_(blocks)
    blocks[1:] = 0xFF  # as before the replay
    expected = runner.run(chunks).logits
    if replayed_blocks is None:
        is_correct = bool((logits - expected).norm() <= LOGITS_TOLERANCE[model.kv_shape.dtype] * expected.norm())
    else:
        is_correct = torch.equal(logits, expected) and all(
            torch.equal(replayed.to(blocks.device), launched)
            for replayed, launched in zip(replayed_blocks, blocks, strict=True)
        )
    return "" if is_correct else "its results differ"


def _chunks(
    shape: StepShape, tokens: bytes, block_size: int, prefix_tokens: int, max_sequence_tokens: int
) -> list[Chunk]:
    """Create a step that nearly fills a shape: one longer request, and others of one token.

    The prefix of each request is the first block, repeated. No sequence is longer than `max_sequence_tokens`.
    """
    num_tokens = max(1, shape.num_tokens - 1)
    num_others = min((shape.num_requests - 1) // 2, num_tokens - 1)
    prefix_blocks = max(0, min(prefix_tokens, max_sequence_tokens - shape.num_tokens)) // block_size
    longest = min(num_tokens - num_others, max_sequence_tokens - prefix_blocks * block_size)
    chunks, next_block_id = [], 1
    for query_len in [longest, *[1] * num_others]:
        num_own_blocks = -(-query_len // block_size)
        own_blocks = np.arange(next_block_id, next_block_id + num_own_blocks, dtype=np.int32)
        next_block_id += num_own_blocks
        start = prefix_blocks * block_size
        block_ids = np.concatenate((np.zeros(prefix_blocks, dtype=np.int32), own_blocks))
        chunks.append(Chunk(tokens, start, start + query_len, block_ids, None, wants_logits=True))
    return chunks
