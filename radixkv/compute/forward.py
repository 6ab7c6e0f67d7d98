"""One forward pass over the pool: its inputs, its outputs, and the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.errors import require_invariant
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.staging import to_device
from radixkv.model.adapters.adapter_set import AdapterRange
from radixkv.model.attention.interface import AttentionKernels, QueryWatcher, WatchedRows
from radixkv.model.attention.paged_step import GroupedStep, PagedStep
from radixkv.model.last_layer import LastLayerRows
from radixkv.model.model import Model
from radixkv.model.states.state_step import StateRows, StateStep
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.state_pool import StatePool
from radixkv.tokens import TOKEN_BYTES

# Below this number of skipped rows, splitting the last layer into two calls costs more than it saves.
_MIN_SKIPPED_ROWS = 8


class ChunkState(NamedTuple):
    """The recurrent states that a chunk reads and writes, for models that have them.

    Attributes:
        source: the slot of the state before its first token; None for the beginning of a sequence.
        writes: pairs of a number of tokens, above the chunk's start and at most its end, and a slot: the state after
            this many tokens of the sequence is written to the slot. The slot may be `source`, which is read first.
    """

    source: int | None
    writes: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part `[start, end)` of one request's tokens, to be computed in one step.

    All tokens before it have K/V, except for dropped ones.

    >>> chunk = Chunk(bytes(40), 4, 10, np.array([3], dtype=np.int32), None, wants_logits=True)
    >>> chunk.num_tokens
    6

    Attributes:
        tokens: all tokens of the request so far, little-endian uint32 bytes. The chunk's own tokens may come later,
            when a prepared step is started.
        block_ids: int32, the blocks of these tokens.
        copy: a block copy to make before the chunk is computed (copy-on-write).
        wants_logits: whether the logits after the chunk's last token are returned.
        wants_all_logits: whether the logits after each of its tokens are returned; overrides `wants_logits`.
        adapter: digest of the adapter; empty for the base model.
        adapter_from: position of the first token that is computed with the adapter; earlier ones use the base model.
        num_dropped: tokens before the chunk whose K/V were dropped; the blocks contain the other K/V without gaps.
        watcher: observes the chunk's queries; None for no observer.
        part_ids: int32, the part of each block in the pool of windowed layers; arbitrary for blocks outside of the
            window. None if all layers are in one pool.
        part_copy: a copy of a part to make before the chunk is computed.
        state: the recurrent states that it reads and writes; None if there are none.
    """

    tokens: bytes | bytearray
    start: int
    end: int
    block_ids: BlockIds
    copy: BlockCopy | None
    wants_logits: bool
    wants_all_logits: bool = False
    adapter: str = ""
    adapter_from: int = 0
    num_dropped: int = 0
    watcher: QueryWatcher | None = None
    part_ids: BlockIds | None = None
    part_copy: BlockCopy | None = None
    state: ChunkState | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this chunk."""
        return self.end - self.start

    @property
    def num_logit_rows(self) -> int:
        """Number of rows of logits that are returned: those after the last tokens of the chunk."""
        return self.num_tokens if self.wants_all_logits else int(self.wants_logits)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The layout of a step: positions and slots of the packed tokens of several requests. Built on the host.

    Attributes:
        positions: int64 `[num_tokens]`, the position of each token in its own sequence.
        logit_rows: int64 `[n]`, the rows whose logits are returned.
        batch: the requests of the tokens, and the block tables and slots of their K/V.
        adapters: the rows that are computed with an adapter.
        watched: the rows whose queries are observed.
        states: the recurrent states that rows read and write; None for a model without states.
        parts: like `batch`, but for the pool of windowed layers; None if all layers are in one pool.
        last_layer: like `batch`, but only for the rows that the last layer computes: those whose logits are returned,
            or the last row if no logits are returned. None if the last layer computes all rows.
    """

    positions: torch.Tensor
    logit_rows: torch.Tensor
    batch: PagedBatch
    adapters: Sequence[AdapterRange] = ()
    watched: Sequence[WatchedRows] = ()
    states: StateRows | None = None
    parts: PagedBatch | None = None
    last_layer: PagedBatch | None = None

    def to(self, device: torch.device) -> StepLayout:
        """Return the same layout with its tensors on a device; see `to_device`."""
        return StepLayout(
            to_device(self.positions, device),
            to_device(self.logit_rows, device),
            self.batch.to(device),
            self.adapters,
            self.watched,
            None if self.states is None else self.states.to(device),
            None if self.parts is None else self.parts.to(device),
            None if self.last_layer is None else self.last_layer.to(device),
        )


def lay_out(
    chunks: Sequence[Chunk], block_size: int, states: StatePool | None = None, *, can_shorten_last_layer: bool = False
) -> StepLayout:
    """Lay out the tokens of some chunks, one chunk after the other, on the host. Does not read the tokens.

    Args:
        chunks: at least one chunk.
        block_size: tokens per block.
        states: the pool of the recurrent states; None for a model without states.
        can_shorten_last_layer: whether the model's last layer can compute only the rows that are needed.
    """
    batch = PagedBatch.build(
        query_lens=[chunk.num_tokens for chunk in chunks],
        kv_lens=[chunk.end - chunk.num_dropped for chunk in chunks],
        block_tables=[chunk.block_ids for chunk in chunks],
        block_size=block_size,
    )
    ends = batch.query_starts[1:]
    logit_rows = [
        row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logit_rows, end)
    ]
    positions = batch.positions  # without the dropped tokens
    if any(chunk.num_dropped for chunk in chunks):
        positions += np.repeat([chunk.num_dropped for chunk in chunks], batch.query_lens)
    adapters = _adapter_ranges(chunks, batch.query_starts)
    parts = _part_batch(chunks, block_size)
    watched = [
        WatchedRows(end - chunk.num_tokens, end, chunk.watcher)
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.watcher is not None
    ]
    last_layer = None
    if can_shorten_last_layer and not (adapters or watched or parts):
        last_layer = _last_layer_batch(chunks, block_size)
    return StepLayout(
        torch.from_numpy(positions),
        torch.tensor(logit_rows, dtype=torch.int64),
        batch,
        adapters,
        watched,
        None if states is None else _state_rows(chunks, batch.query_starts, states),
        parts,
        last_layer,
    )


def _part_batch(chunks: Sequence[Chunk], block_size: int) -> PagedBatch | None:
    """Lay out the pool of windowed layers, if the chunks have parts."""
    tables = [chunk.part_ids for chunk in chunks if chunk.part_ids is not None]
    if not tables:
        return None
    require_invariant("parts", len(tables) == len(chunks), "some chunks have parts, and others do not")
    query_lens = [chunk.num_tokens for chunk in chunks]
    return PagedBatch.build(query_lens, [chunk.end for chunk in chunks], tables, block_size)


def _last_layer_batch(chunks: Sequence[Chunk], block_size: int) -> PagedBatch | None:
    """Lay out the rows whose logits are returned, or else the last row; None if these are almost all rows."""
    needed = [(chunk, chunk.num_logit_rows) for chunk in chunks if chunk.num_logit_rows] or [(chunks[-1], 1)]
    query_lens = [num_rows for _, num_rows in needed]
    if sum(chunk.num_tokens for chunk in chunks) - sum(query_lens) < _MIN_SKIPPED_ROWS:
        return None
    kv_lens = [chunk.end - chunk.num_dropped for chunk, _ in needed]
    return PagedBatch.build(query_lens, kv_lens, [chunk.block_ids for chunk, _ in needed], block_size)


def _state_rows(chunks: Sequence[Chunk], starts: Sequence[int], states: StatePool) -> StateRows:
    """Lay out the recurrent states of the chunks.

    Raises:
        InvariantViolation: a chunk that continues a sequence has no state, or writes one outside of its positions.
    """
    sources, writes = [], []
    for index, chunk in enumerate(chunks):
        source, chunk_writes = chunk.state or ChunkState(None, ())
        require_invariant(
            "states", source is not None or not chunk.start, "a chunk continues a sequence without a state"
        )
        sources.append(states.start if source is None else source)
        for position, slot in chunk_writes:
            require_invariant("states", chunk.start < position <= chunk.end, "a state is written outside a chunk")
            writes.append((index, position - chunk.start, slot))
    return StateRows.build(starts, sources, writes, states.shape.num_inputs)


def _adapter_ranges(chunks: Sequence[Chunk], starts: Sequence[int]) -> list[AdapterRange]:
    """Find the rows that are computed with an adapter, given the first row of each chunk."""
    return [
        AdapterRange(chunk.adapter, row + max(0, chunk.adapter_from - chunk.start), row + chunk.num_tokens)
        for chunk, row in zip(chunks, starts, strict=False)
        if chunk.adapter and chunk.adapter_from < chunk.end
    ]


def pack_tokens(chunks: Sequence[Chunk]) -> torch.Tensor:
    """Return the tokens of some chunks, one chunk after the other, int64 `[num_tokens]` on the host."""
    token_bytes = [chunk.tokens[chunk.start * TOKEN_BYTES : chunk.end * TOKEN_BYTES] for chunk in chunks]
    packed = np.frombuffer(b"".join(token_bytes), dtype="<u4")
    return torch.from_numpy(packed.astype(np.int64))


NO_TOKEN = -1
"""Returned instead of the most likely token if a row of logits contains NaN or +inf, or only -inf."""


class StepOutputs(NamedTuple):
    """Results of a forward pass, on the model's device.

    Attributes:
        logits: float32 `[n, vocab_size]`.
        summary: int64 `[num_tokens + n]`, the values that the host needs after each step: for each token 1 if its K, V
            and last hidden state are finite, otherwise 0; then for each row of logits the most likely token, or
            `NO_TOKEN`. They are in one tensor so that the host waits once.
    """

    logits: torch.Tensor
    summary: torch.Tensor


def compute_step(
    model: Model,
    storage: KVStorage,
    kernels: AttentionKernels,
    input_ids: torch.Tensor,
    layout: StepLayout,
    states: StatePool | None = None,
) -> StepOutputs:
    """Compute all tokens, and write their K/V and recurrent states. Does not wait for the device.

    Args:
        model: the weights.
        storage: the K/V memory.
        kernels: the attention kernels.
        input_ids: int64 `[num_tokens]` on the model's device.
        layout: the layout of these tokens, on the model's device.
        states: the pool of the recurrent states; None for a model without states.
    """
    state_step = None if states is None or layout.states is None else StateStep(states, layout.states)
    step = _step_over(storage, kernels, layout.batch, layout.parts, layout.watched, state_step)
    last_rows = None
    if layout.last_layer is not None:
        rows = layout.logit_rows if len(layout.logit_rows) else layout.positions.new_tensor([len(input_ids) - 1])
        last_rows = LastLayerRows(rows, step.write, _step_over(storage, kernels, layout.last_layer).read)
    logits, is_finite = model.forward(input_ids, layout.positions, step, layout.logit_rows, layout.adapters, last_rows)
    if state_step is not None:
        state_step.keep()
    return StepOutputs(logits, torch.cat((is_finite & step.is_finite, _most_likely(logits))))


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely token of each row, int64 `[n]`, or `NO_TOKEN` if the row has no distribution.

    Only the largest logit is checked. It is NaN if any logit is NaN, since `argmax` orders NaN above all numbers; +inf
    if any logit is +inf; and -inf if all are -inf. A model may exclude single tokens by -inf.
    """
    most_likely = argmax(logits)[:, None]
    largest = logits.gather(1, most_likely)
    return torch.where(largest.isfinite(), most_likely, NO_TOKEN).squeeze(1)


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number of each row, the first one of several. NaN is larger than all numbers.

    On a CPU, NumPy computes it. PyTorch compares one number after another there, and takes 62 us instead of 3 us for
    49,152 numbers.

    >>> argmax(torch.tensor([[0.0, 2.0, 2.0], [float("nan"), 3.0, 1.0]]))
    tensor([1, 0])

    Args:
        rows: float32 or float64 `[n, size]`.

    Returns:
        int64 `[n]`, on the same device.
    """
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy().argmax(axis=-1))
    return rows.argmax(dim=-1)


def _step_over(
    storage: KVStorage,
    kernels: AttentionKernels,
    batch: PagedBatch,
    parts: PagedBatch | None = None,
    watched: Sequence[WatchedRows] = (),
    states: StateStep | None = None,
) -> PagedStep | GroupedStep:
    """Return a step over all pools, given the layouts of blocks and of parts."""
    require_invariant("parts", parts is not None or not storage.part_pools, "the chunks lack the parts of the storage")
    require_invariant("parts", parts is None or bool(storage.part_pools), "the chunks have parts, the storage has none")
    steps = [PagedStep(pool, batch, kernels, watched, states=states) for pool in storage.pools]
    if parts is not None:
        steps += [PagedStep(pool, parts, kernels) for pool in storage.part_pools]
    return steps[0] if len(steps) == 1 else GroupedStep(steps, storage.layer_locations)
