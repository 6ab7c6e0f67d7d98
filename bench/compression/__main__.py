"""Measures lossy compression of K/V: memory, quality and decode speed, for each policy at several budgets.

python -m bench.compression --model MODEL --json bench/results/compression.json

The prompt of each held-out text is computed as usual. Then the model reads the rest token by token, once over the whole
K/V and once for each policy over the entries that the policy keeps, and the predictions are compared. Memory and
quality depend only on model and texts; tokens per second also depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from bench.compression.reading import ReadResult, TextReader
from bench.parts.quality import Command, Comparison, Row, held_out_texts, load, row_of
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.errors import ConfigError


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
