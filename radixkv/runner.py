"""Runs one step: chunks of several requests as one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixkv.attention import AttentionKernels
from radixkv.forward import Chunk, StepInputs, StepOutputs, compute_step, lay_out
from radixkv.kernels.staging import to_device
from radixkv.kv_storage import KVStorage
from radixkv.lease import BlockCopy
from radixkv.model import Model
from radixkv.step_graphs import StepGraphs


class StepResult(NamedTuple):
    """What a step computed.

    Attributes:
        logits: float32 `[n, vocab_size]` on the model's device; valid until the next step is started.
        most_likely: for each row of logits, the token with the largest.
        is_finite: for each chunk, whether K, V and the last hidden states of all its tokens are finite.
    """

    logits: torch.Tensor
    most_likely: list[int]
    is_finite: list[bool]


class Runner:
    """Owns the model and the K/V memory; knows nothing of trees and requests.

    Args:
        model: the weights.
        storage: the K/V memory.
        kernels: what works on it.
        graphs: steps that are recorded over all three; None if there are none.
    """

    def __init__(
        self, model: Model, storage: KVStorage, kernels: AttentionKernels, graphs: StepGraphs | None = None
    ) -> None:
        self.model = model
        self.storage = storage
        self._kernels = kernels
        self._graphs = graphs

    @property
    def has_graphs(self) -> bool:
        """Whether any steps are recorded."""
        return self._graphs is not None and bool(self._graphs.shapes)

    def without_graphs(self) -> Runner:
        """The same model over the same memory, where every step is launched kernel by kernel."""
        return Runner(self.model, self.storage, self._kernels)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device computes a step that was started while the host does something else."""
        return self.model.device.type == "cuda"

    def start(self, chunks: Sequence[Chunk]) -> Callable[[], StepResult]:
        """Copy shared blocks, then compute all chunks in one forward pass. The step before must have been waited for.

        If it is not asynchronous, all is computed when it is waited for.

        Returns:
            Waits, and returns a row of logits for each chunk that wants them, in order, and for each chunk whether all
            its tokens came out finite.
        """
        inputs = lay_out(chunks, self.storage.block_size)
        copies = [chunk.copy for chunk in chunks if chunk.copy is not None]
        if not self.is_asynchronous:
            return lambda: self._read(inputs, self._launch(inputs, copies))
        outputs = self._launch(inputs, copies)
        return lambda: self._read(inputs, outputs)

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Start a step and wait for it; see `start`."""
        return self.start(chunks)()

    def _launch(self, inputs: StepInputs, copies: Sequence[BlockCopy]) -> StepOutputs:
        if copies:
            sources, targets = to_device(torch.tensor(copies).T.contiguous(), self.model.device)
            self._kernels.copy_blocks(self.storage.pool, sources, targets)
        outputs = None if self._graphs is None else self._graphs.compute(inputs)
        if outputs is None:
            outputs = compute_step(self.model, self.storage.pool, self._kernels, inputs.to(self.model.device))
        return outputs

    def _read(self, inputs: StepInputs, outputs: StepOutputs) -> StepResult:
        summary = outputs.summary.cpu().numpy()  # waits
        are_finite, most_likely = np.split(summary, [len(summary) - len(outputs.logits)])
        *starts, num_tokens = inputs.batch.query_starts
        is_finite = np.logical_and.reduceat(are_finite[:num_tokens], starts)
        num_rows = len(inputs.logit_rows)
        return StepResult(outputs.logits[:num_rows], most_likely[:num_rows].tolist(), is_finite.tolist())
