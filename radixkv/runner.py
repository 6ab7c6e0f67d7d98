"""Runs one step: chunks of several requests as one forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from radixkv.attention import AttentionKernels
from radixkv.block_pool import BlockIds
from radixkv.forward import StepInputs, compute_step
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.staging import to_device
from radixkv.kv_storage import KVStorage
from radixkv.lease import BlockCopy
from radixkv.model import Model


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part `[start, end)` of one request's tokens, to be computed in one step. K/V of all tokens before it exist.

    Attributes:
        tokens: all of them so far, little-endian uint32 bytes.
        block_ids: int32, their blocks.
        copy: a block copy to make first.
        wants_logits: whether the logits after the chunk's last token are wanted.
    """

    tokens: bytes
    start: int
    end: int
    block_ids: BlockIds
    copy: BlockCopy | None
    wants_logits: bool

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this chunk."""
        return self.end - self.start


class StepResult(NamedTuple):
    """What a step computed.

    Attributes:
        logits: float32 `[n, vocab_size]` on the model's device; valid until the next step.
        most_likely: for each row of logits, the token with the largest.
        is_finite: for each chunk, whether K, V and the last hidden states of all its tokens are finite.
    """

    logits: torch.Tensor
    most_likely: list[int]
    is_finite: list[bool]


class Runner:
    """Owns the model and the K/V memory; knows nothing of trees and requests."""

    def __init__(self, model: Model, storage: KVStorage, kernels: AttentionKernels) -> None:
        self.model = model
        self.storage = storage
        self._kernels = kernels

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Copy shared blocks, then compute all chunks in one forward pass.

        Returns:
            A row of logits for each chunk that wants them, in order, and for each chunk whether all its tokens came
            out finite. Waits for the device.
        """
        self._copy_shared_blocks(chunks)
        inputs = _lay_out(chunks, self.storage.block_size)
        outputs = compute_step(self.model, self.storage.pool, self._kernels, inputs.to(self.model.device))
        summary = outputs.summary.tolist()
        most_likely = summary[len(summary) - len(outputs.logits) :]
        starts = inputs.batch.query_starts
        is_finite = [all(summary[start:end]) for start, end in itertools.pairwise(starts)]
        num_rows = len(inputs.logit_rows)
        return StepResult(outputs.logits[:num_rows], most_likely[:num_rows], is_finite)

    def _copy_shared_blocks(self, chunks: Sequence[Chunk]) -> None:
        copies = [chunk.copy for chunk in chunks if chunk.copy is not None]
        if copies:
            sources, targets = to_device(torch.tensor(copies).T.contiguous(), self.model.device)
            self._kernels.copy_blocks(self.storage.pool, sources, targets)


def _lay_out(chunks: Sequence[Chunk], block_size: int) -> StepInputs:
    """Pack the chunks' tokens, on the host."""
    batch = PagedBatch.build(
        query_lens=[chunk.num_tokens for chunk in chunks],
        kv_lens=[chunk.end for chunk in chunks],
        block_tables=[chunk.block_ids for chunk in chunks],
        block_size=block_size,
    )
    input_ids = np.concatenate([np.frombuffer(c.tokens, dtype="<u4")[c.start : c.end] for c in chunks])
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    ends = batch.query_starts[1:]
    logit_rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.wants_logits]
    return StepInputs(
        torch.from_numpy(input_ids.astype(np.int64)),
        torch.from_numpy(positions),
        torch.tensor(logit_rows, dtype=torch.int64),
        batch,
    )
