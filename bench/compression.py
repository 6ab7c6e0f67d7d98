"""Measures lossy compression of K/V: memory, quality and decode speed, for each policy at several budgets.

python -m bench.compression --model MODEL --json bench/results/compression.json

The prompt of each held-out text is computed as usual. Then the model reads the rest token by token, once over the whole
K/V and once for each policy over the entries that the policy keeps, and the predictions are compared. Memory and
quality depend only on model and texts; tokens per second also depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.parts.quality import Command, Comparison, Row, held_out_texts, load, row_of
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.blocks import BlockIds
from radixkv.compute.forward import Chunk
from radixkv.compute.kept_entries import KeepRule, KeptEntries
from radixkv.compute.runner import Runner
from radixkv.engine.compression import rule_of
from radixkv.errors import ConfigError
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from radixkv.tokens import TOKEN_BYTES

BLOCK_SIZE = 16
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The outcome of reading.

    Attributes:
        logits: float32 `[num_texts, num_tokens, vocab_size]`, after each token that was read.
        seconds: time to choose, drop and compute, without the prompts.
        blocks: private blocks of a text at the end.
    """

    logits: torch.Tensor
    seconds: float
    blocks: int


class TextReader:
    """Computes the prompts of some texts once, and reads the rest of the texts with each compression.

    Args:
        model: the model, on a CPU.
        texts: int64, of equal lengths.
        num_prompt_tokens: number of tokens of each text that are its prompt.
    """

    def __init__(self, model: Model, texts: Sequence[torch.Tensor], num_prompt_tokens: int) -> None:
        self._model = model
        self._texts = [text.numpy().astype("<u4").tobytes() for text in texts]
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = len(texts[0])
        self._num_blocks = -(-self._num_tokens // BLOCK_SIZE)
        storage = KVStorage(
            2 * len(texts) * self._num_blocks, BLOCK_SIZE, model.kv_shape, model.device, is_by_layer=True
        )
        self._runner = Runner(model, storage, TorchKernels())
        self.block_bytes = storage.block_bytes
        for index in range(len(texts)):
            for start in range(0, num_prompt_tokens, _CHUNK_TOKENS):
                end = min(num_prompt_tokens, start + _CHUNK_TOKENS)
                self._runner.run([self._prompt_chunk(index, start, end)])

    def read(self, compression: Compression | None, *, is_renumbered: bool = False) -> ReadResult:
        """Read all texts to their ends, as one batch.

        Args:
            compression: which entries are kept; None for all of them.
            is_renumbered: whether positions are counted among the kept entries, as in StreamingLLM. Only for
                models with plain rotary positions, and for policies that drop the oldest entries.
        """
        num_new_tokens = self._num_tokens - self._num_prompt_tokens
        if compression is None:
            max_entries = self._num_tokens
            rule = KeepRule(
                num_entries=max_entries,
                num_sinks=0,
                num_recent=0,
                num_observed=0,
                is_pooled=False,
                drops_generated=False,
            )
        else:
            max_entries = compression.max_entries(self._num_prompt_tokens, num_new_tokens + 1)
            rule = rule_of(compression)
        num_blocks = -(-min(max_entries, self._num_tokens) // BLOCK_SIZE)
        logits_by_token = []
        start_s = time.perf_counter()
        readers = [
            _OneTextReader(
                self._runner,
                rule,
                self._prompt_chunk(index, 0, self._num_prompt_tokens),
                self._block_ids(len(self._texts) + index)[:num_blocks],
                is_renumbered=is_renumbered,
            )
            for index in range(len(self._texts))
        ]
        for _ in range(num_new_tokens):
            logits_by_token.append(self._runner.run([reader.next_chunk() for reader in readers]).logits.clone())
            for reader in readers:
                reader.record_computed()
        return ReadResult(torch.stack(logits_by_token, dim=1), time.perf_counter() - start_s, num_blocks)

    def _block_ids(self, number: int) -> BlockIds:
        """Return the blocks of a sequence. The prompts come first, then the private blocks of the readers."""
        return np.arange(number * self._num_blocks, (number + 1) * self._num_blocks, dtype=np.int32)

    def _prompt_chunk(self, index: int, start: int, end: int) -> Chunk:
        return Chunk(self._texts[index], start, end, self._block_ids(index), None, wants_logits=False)


class _OneTextReader:
    """Reads one text, and keeps the same entries as `radixkv.engine.compression.Compressor` does for a request."""

    def __init__(
        self, runner: Runner, rule: KeepRule, prompt: Chunk, block_ids: BlockIds, *, is_renumbered: bool
    ) -> None:
        self._kept = KeptEntries.of_prompt(runner, rule, prompt, block_ids)
        self._runner = runner
        self._rule = rule
        self._tokens = prompt.tokens
        self._block_ids = block_ids
        self._num_read = prompt.end
        self._num_dropped = prompt.end - self._kept.num_entries
        self._is_renumbered = is_renumbered
        if is_renumbered:
            self._shift_positions(-self._num_dropped)

    def next_chunk(self) -> Chunk:
        """Drop an entry if the kept ones fill the budget, and return the chunk of the next token."""
        if self._kept.is_full:
            self._kept.drop()
            self._num_dropped += 1
            if self._is_renumbered:
                self._shift_positions(-1)
        start, tokens, num_dropped = self._num_read, self._tokens, self._num_dropped
        if self._is_renumbered:
            start, tokens, num_dropped = start - num_dropped, tokens[num_dropped * TOKEN_BYTES :], 0
        watcher = self._kept if self._kept.watches else None
        return Chunk(
            tokens,
            start,
            start + 1,
            self._block_ids,
            None,
            wants_logits=True,
            num_dropped=num_dropped,
            watcher=watcher,
        )

    def record_computed(self) -> None:
        """Record that the token of the last chunk was computed."""
        self._kept.append(self._num_read)
        self._num_read += 1

    def _shift_positions(self, by: int) -> None:
        """Rotate the keys of all entries except the sinks as if their positions were larger by `by`."""
        pool = self._runner.storage.pool
        frequencies = self._runner.model.module.model.rotary_emb.inv_freq
        angles = torch.cat((frequencies, frequencies)) * by
        block_ids = torch.from_numpy(self._block_ids).long()
        entries = torch.arange(self._rule.num_sinks, self._kept.num_entries)  # sinks are never moved
        index = (block_ids[entries // BLOCK_SIZE], slice(None), 0, slice(None), entries % BLOCK_SIZE)
        keys = pool.values[index]  # [num_entries, num_layers, num_kv_heads, head_dim]
        first_half, second_half = keys.chunk(2, dim=-1)
        pool.values[index] = keys * angles.cos() + torch.cat((-second_half, first_half), dim=-1) * angles.sin()


def measure(
    path: str, num_texts: int, num_prompt_tokens: int, num_new_tokens: int, budgets: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for the whole K/V, and for each budget one for each policy and two for variants of StreamingLLM.

    A row has the blocks and bytes that a text holds at the end. Tokens per second are those of all texts together, and
    include choosing and dropping entries.

    Args:
        path: the model.
        num_texts, num_prompt_tokens: number of texts, and tokens of each that are its prompt.
        num_new_tokens: tokens that are read after each prompt.
        budgets: maximum numbers of entries.

    Raises:
        ConfigError: the model can't be measured.
    """
    model = load(path)
    if any(window is not None for window in model.windows):
        raise ConfigError(f"{model.name}: compression is refused for models with sliding windows")
    texts = held_out_texts(path, num_texts, num_prompt_tokens + num_new_tokens)
    reader = TextReader(model, texts, num_prompt_tokens)
    uncompressed = reader.read(None)

    def row(policy: str, positions: str, max_tokens: int | None, read: ReadResult) -> Row:
        comparison = Comparison()
        for logits, reference, ids in zip(read.logits, uncompressed.logits, texts, strict=True):
            comparison.add(logits, reference, ids[-num_new_tokens:])
        return row_of(
            model,
            comparison.quality(),
            policy=policy,
            positions=positions,
            max_tokens=max_tokens,
            blocks=read.blocks,
            kv_bytes=read.blocks * reader.block_bytes,
            tokens_per_s=num_texts * num_new_tokens / read.seconds,
        )

    yield row("none", "true", None, uncompressed)
    for budget in budgets:
        for policy in CompressionPolicy:
            yield row(policy, "true", budget, reader.read(Compression(policy, budget)))
        streaming = Compression(CompressionPolicy.STREAMING_LLM, budget)
        yield row(streaming.policy, "renumbered", budget, reader.read(streaming, is_renumbered=True))
        without_sinks = Compression(CompressionPolicy.STREAMING_LLM, budget, num_sinks=0)
        yield row("window without sinks", "true", budget, reader.read(without_sinks))


COMMAND = Command(
    name="compression",
    description="Measure what lossy compression of K/V costs in quality, and what it saves.",
    header=f"{'policy':>20} {'positions':>10} {'budget':>6} {'bytes':>10} {'tokens/s':>8}",
    columns="{policy:>20} {positions:>10} {max_tokens!s:>6} {kv_bytes:10} {tokens_per_s:8.0f}",
    num_texts=8,
    sizes={"prompt_tokens": 1024, "new_tokens": 256, "budgets": (128, 256, 512)},
)


def _measure(path: str, options: argparse.Namespace) -> Iterator[Row]:
    return measure(path, options.texts, options.prompt_tokens, options.new_tokens, options.budgets)


if __name__ == "__main__":
    sys.exit(COMMAND.run(_measure))
