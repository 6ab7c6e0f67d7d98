"""A runner without a model: K and V encode the adapter and the whole prefix, so wrong reuse is detected at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from radixkv.compute.device_stats import DeviceStats
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Launch, StepResult, Wait
from radixkv.config.sequence_limit import SequenceLimit

VOCAB_SIZE = 256
Seen = tuple[str, bytes]  # an adapter and the position from which it applies; all tokens up to a position


class FakeRunner:
    """Writes each computed token's adapter and whole prefix into its slot, and reads back what a real model would
    attend to. A recurrent state is represented by its prefix; with `has_states`, each chunk must continue from the
    state of the tokens before it.

    The logits after a prompt are one-hot at `next_token(prompt, adapter)`.
    """

    is_asynchronous = True
    compression_refusal = "a model without attention"

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int | None = None) -> None:
        self.model = SimpleNamespace(
            name="fake",
            device=torch.device("cpu"),
            vocab_size=VOCAB_SIZE,
            max_tokens=max_tokens,
            limit=SequenceLimit(max_tokens, max_tokens),
            eos_token_ids=frozenset(),
        )
        self.fingerprint = "fake weights"
        self.storage = SimpleNamespace(block_bytes=0, kv_dtype="fp32")
        self.steps: list[list[tuple[int, int]]] = []  # (start, end) of each chunk of each step
        self.fail_next: Exception | None = None
        self.logits_scale = 1.0
        self.not_finite: bytes | None = None  # the prompt whose values come out as NaN
        self.has_states = False
        self.states: dict[int, Seen] = {}  # by slot
        self._block_size = block_size
        self.content: list[list[Seen | None]] = [[None] * block_size for _ in range(num_blocks)]

    def device_stats(self) -> DeviceStats:
        return DeviceStats("fake attention", captured_steps=0, dropped_steps=0, used_bytes=None, total_bytes=None)

    @property
    def computed_tokens(self) -> int:
        return sum(end - start for step in self.steps for start, end in step)

    def prepare(self, chunks: Sequence[Chunk]) -> Launch:
        chunks = [dataclasses.replace(chunk, block_ids=chunk.block_ids.copy()) for chunk in chunks]
        return lambda input_ids: self.begin(with_tokens(chunks, input_ids))

    def start(self, chunks: Sequence[Chunk]) -> Wait:
        return self.begin(chunks)

    def begin(self, chunks: Sequence[Chunk]) -> Wait:
        """Start a step, whether it was prepared or not."""
        return lambda: self.run(chunks)

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for chunk in chunks:
            if chunk.copy is not None:
                self.content[chunk.copy.target] = list(self.content[chunk.copy.source])
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                self._slot(chunk, position)[position % self._block_size] = _seen(chunk, position)
        for chunk in chunks:
            for position in range(chunk.end):
                seen = self._slot(chunk, position)[position % self._block_size]
                assert seen == _seen(chunk, position), f"position {position} holds another prefix's K/V"
        self._check_and_write_states(chunks)
        self.steps.append([(chunk.start, chunk.end) for chunk in chunks])
        are_finite = [chunk.tokens != self.not_finite for chunk in chunks]
        rows = []
        for chunk, is_finite in zip(chunks, are_finite, strict=True):
            scale = self.logits_scale if is_finite else torch.nan
            for position in range(chunk.end - chunk.num_logit_rows, chunk.end):
                prefix = chunk.tokens[: 4 * (position + 1)]
                rows.append(scale * one_hot(next_token(prefix, _adapter_at(chunk, position))))
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)
        return StepResult(logits, logits.argmax(dim=-1).tolist(), are_finite)

    def forget_everything(self) -> None:
        """Wipe the K/V of all blocks, so that reading a cached one fails."""
        self.content = [[None] * self._block_size for _ in self.content]

    def _check_and_write_states(self, chunks: Sequence[Chunk]) -> None:
        """Check the states from which the chunks continue, and then write the states that they leave."""
        for chunk in chunks if self.has_states else ():
            assert chunk.state is not None
            source = chunk.state.source
            assert (source is None) == (chunk.start == 0), "only the first chunk of a prompt starts without a state"
            if source is not None:
                assert self.states[source] == _seen(chunk, chunk.start - 1), "a slot holds another prefix's state"
        written = [(slot, _seen(chunk, end - 1)) for chunk in chunks if chunk.state for end, slot in chunk.state.writes]
        assert len(dict(written)) == len(written), "a slot is written twice"
        self.states.update(written)

    def _slot(self, chunk: Chunk, position: int) -> list[Seen | None]:
        return self.content[int(chunk.block_ids[position // self._block_size])]


def with_tokens(chunks: Sequence[Chunk], input_ids: torch.Tensor) -> list[Chunk]:
    """Return prepared chunks with the tokens that are known only when their step starts."""
    completed, start = [], 0
    for chunk in chunks:
        chunk_tokens = tokens(input_ids[start : start + chunk.num_tokens].tolist())
        completed.append(dataclasses.replace(chunk, tokens=chunk.tokens[: chunk.start * 4] + chunk_tokens))
        start += chunk.num_tokens
    assert start == len(input_ids), f"{len(input_ids)} input ids for chunks of {start} tokens"
    return completed


def next_token(tokens: bytes, adapter: str = "") -> int:
    """Return the token that the fake model predicts after a prompt."""
    return (sum(tokens) + sum(adapter.encode())) % VOCAB_SIZE


def continuation(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the tokens that the fake model generates after a prompt."""
    path = list(ids)
    for _ in range(count):
        path.append(next_token(tokens(path)))
    return tuple(path[len(ids) :])


def _seen(chunk: Chunk, position: int) -> Seen:
    """Return what a slot holds after the token at `position` is computed: the adapter and all tokens up to it."""
    adapter = _adapter_at(chunk, position)
    return f"{adapter}@{chunk.adapter_from}" if adapter else "", bytes(chunk.tokens[: (position + 1) * 4])


def _adapter_at(chunk: Chunk, position: int) -> str:
    return chunk.adapter if position >= chunk.adapter_from else ""


def one_hot(token_id: int) -> torch.Tensor:
    row = torch.zeros(VOCAB_SIZE)
    row[token_id] = 1.0
    return row


def tokens(ids: Sequence[int] | range) -> bytes:
    """Return token ids as the engine expects them: little-endian uint32."""
    return np.asarray(list(ids), dtype="<u4").tobytes()
