"""Runs one step: chunks of several requests as one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.attention import AttentionKernels, PagedStep
from radixkv.block_pool import BlockIds
from radixkv.kernels.batch import PagedBatch
from radixkv.kv_storage import KVStorage
from radixkv.lease import BlockCopy
from radixkv.model import Model


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part `[start, end)` of one prompt, to be computed in one step. K/V of all tokens before it exist.

    Attributes:
        tokens: the whole prompt, little-endian uint32 bytes.
        block_ids: int32, the prompt's blocks.
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


class Runner:
    """Owns the model and the K/V memory; knows nothing of trees and requests."""

    def __init__(self, model: Model, storage: KVStorage, kernels: AttentionKernels) -> None:
        self.model = model
        self.storage = storage
        self._kernels = kernels

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Copy shared blocks, then compute all chunks in one forward pass.

        Returns:
            float32 `[n, vocab_size]` on the model's device: a row for each chunk that wants logits, in order.
        """
        self._copy_shared_blocks(chunks)
        device = self.model.device
        batch = PagedBatch.build(
            query_lens=[chunk.num_tokens for chunk in chunks],
            kv_lens=[chunk.end for chunk in chunks],
            block_tables=[chunk.block_ids for chunk in chunks],
            block_size=self.storage.block_size,
            device=device,
        )
        input_ids = np.concatenate([np.frombuffer(c.tokens, dtype="<u4")[c.start : c.end] for c in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        ends = batch.query_starts[1:]
        rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.wants_logits]
        return self.model.forward(
            torch.from_numpy(input_ids.astype(np.int64)).to(device),
            torch.from_numpy(positions).to(device),
            PagedStep(self.storage.pool, batch, self._kernels),
            torch.tensor(rows, dtype=torch.int64, device=device),
        )

    def _copy_shared_blocks(self, chunks: Sequence[Chunk]) -> None:
        copies = [chunk.copy for chunk in chunks if chunk.copy is not None]
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64, device=self.model.device)  # [num_copies, 2]
            self._kernels.copy_blocks(self.storage.pool, pairs[:, 0], pairs[:, 1])
