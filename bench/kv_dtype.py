"""Measures what each storage format of K and V costs in quality, and how many tokens fit compared with bfloat16.

python -m bench.kv_dtype --model MODEL --json bench/results/kv_dtype.json

The model reads held-out texts over a pool of each format (`cache.kv_dtype`), and computes in float32. The reference is
a pool of float32.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import torch

from bench.parts.quality import Command, Comparison, PoolText, Row, held_out_texts, load, row_of
from radixkv.config import KV_DTYPES
from radixkv.errors import ConfigError
from radixkv.model.model import Model


def logits_of(model: Model, kv_dtype: str, ids: torch.Tensor, *, is_checked: bool = False) -> torch.Tensor:
    """Return the logits after each token of a text, computed at once.

    Args:
        model: the model.
        kv_dtype: format of the pool.
        ids: the text, int64 `[num_tokens]`.
        is_checked: whether, in exact mode, the text is computed a second time, in two parts, so that the second part
            hits the first one.

    Raises:
        AssertionError: the logits of the second time are not bitwise identical.
    """
    logits = PoolText(model, kv_dtype, ids.numel()).append(ids)
    if is_checked and model.is_exact:
        text_in_parts, cut = PoolText(model, kv_dtype, ids.numel()), ids.numel() // 3
        logits_in_parts = torch.cat((text_in_parts.append(ids[:cut]), text_in_parts.append(ids[cut:])))
        assert torch.equal(logits, logits_in_parts), f"{kv_dtype}: a hit changes the answer"
    return logits


def measure(path: str, num_texts: int, num_tokens: int) -> Iterator[Row]:
    """Yield a row for each format that the model supports.

    Args:
        path: the model.
        num_texts, num_tokens: texts that it reads, and their length.
    """
    model = load(path)
    shapes = {}
    for kv_dtype in KV_DTYPES:
        try:
            shapes[kv_dtype] = model.kv_shape.stored_as(kv_dtype)
        except ConfigError as error:
            print(f"{model.name}: {error}")
    comparisons = {kv_dtype: Comparison() for kv_dtype in shapes}
    for index, ids in enumerate(held_out_texts(path, num_texts, num_tokens)):
        reference = logits_of(model, "auto", ids, is_checked=index == 0)
        for kv_dtype, comparison in comparisons.items():
            is_reference = kv_dtype == "auto"
            logits = reference if is_reference else logits_of(model, kv_dtype, ids, is_checked=index == 0)
            comparison.add(logits, reference, ids)
    bf16_bytes = dataclasses.replace(model.kv_shape, dtype=torch.bfloat16).token_bytes
    for kv_dtype, shape in shapes.items():
        yield row_of(
            model,
            comparisons[kv_dtype].quality(),
            head_dim=shape.head_dim,
            kv_dtype=shape.format.name,
            token_bytes=shape.token_bytes,
            tokens_over_bf16=bf16_bytes / shape.token_bytes,
        )


COMMAND = Command(
    name="kv_dtype",
    description="Measure what storage formats of K and V cost in quality.",
    header=f"{'K/V':>6} {'fits':>5}",
    columns="{kv_dtype:>6} {tokens_over_bf16:5.2f}",
    num_texts=8,
    sizes={"tokens": 512},
)

if __name__ == "__main__":
    sys.exit(COMMAND.run(lambda path, options: measure(path, options.texts, options.tokens)))
