"""Runs one step: chunks of several requests as one forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from radixkv.blocks import BlockCopy
from radixkv.compute.device_stats import DeviceStats
from radixkv.compute.forward import NO_TOKEN, Chunk, StepLayout, StepOutputs, compute_step, lay_out, pack_tokens
from radixkv.compute.graphs.graphs import StepGraphs
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.staging import to_device
from radixkv.model.attention.interface import AttentionKernels, QueryWatcher
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.fingerprint import fingerprint_kv
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_bytes import payload_layout
from radixkv.storage.state_pool import StatePool


class StepResult(NamedTuple):
    """Results of a step, after the device has computed it.

    Attributes:
        logits: float32 `[n, vocab_size]` on the model's device; valid until the next step is started.
        most_likely: for each row of logits, the token with the largest logit; any token where the chunk is not finite.
        is_finite: for each chunk, whether K, V and the last hidden states of all its tokens are finite, and the largest
            logit of each of its rows.
    """

    logits: torch.Tensor
    most_likely: list[int]
    is_finite: list[bool]


# Waits for a step that was started, and returns its result. To be called once.
Wait: TypeAlias = Callable[[], StepResult]
# Starts a prepared step, given the concatenated tokens of its chunks, int64 `[num_tokens]` on the host. `Wait` of the
# previous step must have been called.
Launch: TypeAlias = Callable[[torch.Tensor], Wait]


class Runner:
    """Owns the model and the K/V memory, and computes steps. Knows nothing of trees and requests.

    A step is prepared, started, and waited for. The next step may be prepared while it is running:

        host      prepare 1 │ start 1 │ prepare 2 │ wait 1 │ start 2 │ prepare 3 ...
        device              [ step 1 ............. )       [ step 2 ......

    Args:
        model: the weights.
        storage: the K/V memory.
        kernels: the operations on it.
        graphs: CUDA graphs of steps, captured over model, storage and kernels; None for none.
        num_state_slots: number of slots for recurrent states; 0 for a model without states.

    Attributes:
        model, storage: the arguments.
        states: the recurrent states; None for a model without states.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        kernels: AttentionKernels,
        graphs: StepGraphs | None = None,
        num_state_slots: int = 0,
    ) -> None:
        self.model = model
        self.storage = storage
        self._kernels = kernels
        self._graphs = graphs
        shape = model.state_shape
        self.states = None if shape is None else StatePool(num_state_slots, shape, model.device)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model and the K/V format; see `radixkv.model.fingerprint`."""
        storage = self.storage
        stored_as = f"{storage.kv_dtype}: {payload_layout(storage.pools)}"
        return fingerprint_kv(self.model.fingerprint, stored_as, storage.block_size)

    @property
    def has_graphs(self) -> bool:
        """Whether any step is captured as a CUDA graph."""
        return self._graphs is not None and bool(self._graphs.shapes)

    def device_stats(self) -> DeviceStats:
        """Return how steps are computed, and the memory of the device. May be called from any thread."""
        used_bytes = total_bytes = None
        if self.model.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.model.device)
            used_bytes = total_bytes - free_bytes
        return DeviceStats(
            attention=self._kernels.name,
            captured_steps=0 if self._graphs is None else len(self._graphs.shapes),
            dropped_steps=0 if self._graphs is None else self._graphs.num_dropped,
            used_bytes=used_bytes,
            total_bytes=total_bytes,
        )

    def without_graphs(self) -> Runner:
        """Return a runner of the same model and memory that launches every step kernel by kernel."""
        return Runner(self.model, self.storage, self._kernels)

    @property
    def compression_refusal(self) -> str:
        """Reason why generations cannot drop K/V; empty if they can."""
        if self.model.device.type != "cpu":
            return f"a model on {self.model.device.type}, where it is not tested yet"
        if self.model.state_shape is not None:
            return "a model with recurrent layers, whose state depends on all tokens"
        if self.model.kv_shape.heads:
            return "a model whose layers store K/V of different shapes, which cannot drop the same tokens"
        if any(kind.window is not None for kind in self.model.attention_kinds):
            return "a model with sliding windows, which already limit the visible tokens"
        return ""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device computes a started step while the host does other work."""
        return self.model.device.type == "cuda"

    def prepare(self, chunks: Sequence[Chunk]) -> Launch:
        """Do the work of a step that does not need its tokens. The previous step may still be running.

        A step with a CUDA graph is planned and written to pinned memory. For other steps, only the tables are created.
        Steps with adapters have no graph, since adapters add matmuls of other shapes. Steps with recurrent states and
        steps whose queries are observed have no graph either.

        Returns:
            A function that starts the step; see `start`. It must not be called after another step was prepared.
        """
        layout = lay_out(
            chunks, self.storage.block_size, self.states, can_shorten_last_layer=self.model.can_shorten_last_layer
        )
        block_copies = [chunk.copy for chunk in chunks if chunk.copy is not None]
        part_copies = [chunk.part_copy for chunk in chunks if chunk.part_copy is not None]
        copies_by_pool = [(pool, block_copies) for pool in self.storage.pools]
        copies_by_pool += [(pool, part_copies) for pool in self.storage.part_pools]
        may_be_captured = not (layout.adapters or layout.watched or layout.states)
        compute = self._graphs.prepare(layout) if self._graphs is not None and may_be_captured else None
        if compute is None:
            compute = functools.partial(self._compute, layout)
        return functools.partial(self._start, layout, copies_by_pool, compute)

    def start(self, chunks: Sequence[Chunk]) -> Wait:
        """Make the block copies, then compute all chunks in one forward pass. The previous step must be finished.

        If the runner is not asynchronous, the step is computed when the returned function is called.

        Returns:
            A function that waits for the device and returns the result. Its rows of logits are those that the chunks
            request, in order.
        """
        return self.prepare(chunks)(pack_tokens(chunks))

    def observe(self, chunk: Chunk, num_tokens: int, watcher: QueryWatcher) -> None:
        """Compute the last tokens of a chunk once more, so that a watcher can observe their queries. Writes nothing.

        Args:
            chunk: a chunk whose K/V, including those of its own tokens, are in the pool.
            num_tokens: number of tokens to compute.
            watcher: called for each layer.
        """
        last_tokens = dataclasses.replace(
            chunk, start=chunk.end - num_tokens, copy=None, wants_logits=False, watcher=watcher
        )
        layout = lay_out([last_tokens], self.storage.block_size).to(self.model.device)
        step = PagedStep(self.storage.pool, layout.batch, self._kernels, layout.watched, is_reading=True)
        input_ids = to_device(pack_tokens([last_tokens]), self.model.device)
        self.model.forward(input_ids, layout.positions, step, layout.logit_rows, layout.adapters)

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Start a step and wait for it; see `start`."""
        return self.start(chunks)()

    def _start(
        self,
        layout: StepLayout,
        copies_by_pool: Sequence[tuple[KVPool, Sequence[BlockCopy]]],
        compute: Callable[[torch.Tensor], StepOutputs],
        input_ids: torch.Tensor,
    ) -> Wait:
        def copy_and_compute() -> StepOutputs:
            for pool, copies in copies_by_pool:
                if copies:
                    sources, targets = to_device(torch.tensor(copies).T.contiguous(), self.model.device)
                    self._kernels.copy_blocks(pool, sources, targets)
            return compute(input_ids)

        if not self.is_asynchronous:
            return lambda: _read(layout, copy_and_compute())
        outputs = copy_and_compute()
        return lambda: _read(layout, outputs)

    def _compute(self, layout: StepLayout, input_ids: torch.Tensor) -> StepOutputs:
        device = self.model.device
        return compute_step(
            self.model, self.storage, self._kernels, to_device(input_ids, device), layout.to(device), self.states
        )


def _read(layout: StepLayout, outputs: StepOutputs) -> StepResult:
    summary = outputs.summary.cpu().numpy()  # waits
    finite_tokens, most_likely = np.split(summary, [len(summary) - len(outputs.logits)])
    *starts, num_tokens = layout.batch.query_starts
    num_rows = len(layout.logit_rows)
    most_likely = most_likely[:num_rows]
    rows_without_token = layout.logit_rows.numpy()[most_likely == NO_TOKEN]
    finite_tokens[rows_without_token] = 0
    finite_chunks = np.logical_and.reduceat(finite_tokens[:num_tokens], starts)
    return StepResult(outputs.logits[:num_rows], np.maximum(most_likely, 0).tolist(), finite_chunks.tolist())
