"""Measures how quantization changes predictions: the same texts over a pool of each dtype, and how many tokens fit.

python -m bench.kv_dtype --weights int8 --json bench/results/kv_dtype.json

`--weights int8` adds weights of 8 bits, over a pool of the model's own dtype. On a processor whose int8 sums may
saturate, radixkv refuses to serve such weights; `tiny` and `random` then multiply the same integers in float64.

`tiny` reads documents that it was not trained on. Texts for other models are sampled from the model itself, over a pool
of its own dtype, so that the model assigns them a low perplexity. Use `--models DIR` to measure your own model: random
weights have no outliers, and their attention has no structure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div
from tqdm import trange
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from bench.parts.environment import describe_run
from bench.perplexity.rounded_linear import round_linears
from bench.training.corpus import held_out_documents
from bench.training.tokenizer import load_tokenizer
from radixkv.config import KV_DTYPES, ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.storage.device_pool import KVStorage

BLOCK_SIZE = 64

Row = dict[str, float | int | str | None]


def build_model(name: str, num_layers: int, weights: str = "auto") -> Model:
    """Load a model. `random` has layers of Qwen3 0.6B, head dim 128, and weights wide enough to prefer some tokens.

    Other names are paths, as `model.path` takes them. `tiny` and `random` have weights of 8 bits on any processor.
    """
    if name not in ("tiny", "random"):
        return load_model(ModelConfig(path=name, device="cpu", weights=weights))
    module = build_tiny_model(ATTENTION_NAME) if name == "tiny" else _random_module(num_layers)
    if weights == "int8" and not adds_integers_exactly():
        round_linears(module)
        return Model(name, module, torch.device("cpu"), is_exact=False)
    return Model(name, module, torch.device("cpu"), weights=weights)


def _random_module(num_layers: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)


class Text:
    """A text that a model computes token by token, over its own pool.

    Args:
        model: the model.
        kv_dtype: dtype of the pool, as `cache.kv_dtype`.
        max_tokens: capacity of the pool.
    """

    def __init__(self, model: Model, kv_dtype: str, max_tokens: int) -> None:
        self._model = model
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.storage = KVStorage(num_blocks, BLOCK_SIZE, model.kv_shape.stored_as(kv_dtype), model.device)
        self._block_ids = np.arange(num_blocks, dtype=np.int32)
        self._num_tokens = 0

    def append(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the next tokens, int64 `[n]`. Returns the logits after each, float32 `[n, vocab_size]`."""
        start, self._num_tokens = self._num_tokens, self._num_tokens + ids.numel()
        batch = PagedBatch.build([ids.numel()], [self._num_tokens], [self._block_ids], BLOCK_SIZE)
        step = PagedStep(self.storage.pool, batch, TorchKernels())
        positions = torch.arange(start, self._num_tokens)
        return self._model.forward(ids, positions, step, torch.arange(ids.numel()))[0]


def draw_text(model: Model, num_tokens: int, seed: int) -> torch.Tensor:
    """Sample a text from the model at temperature 1, over a pool of its own dtype. Returns int64 `[num_tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocab_size, (1,), generator=generator)
    text = Text(model, "auto", num_tokens)
    for _ in trange(num_tokens - 1, desc=f"text {seed}", leave=False, disable=None):
        probabilities = text.append(ids[-1:])[0].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1, generator=generator)))
    return ids


def held_out_texts(num_texts: int, num_tokens: int) -> list[torch.Tensor]:
    """Return pieces of the held-out documents in turn, spread over their whole length, int64 `[num_tokens]` each."""
    tokenizer = load_tokenizer()
    documents = [torch.tensor(tokenizer.encode(document.text)) for document in held_out_documents()]
    texts = []
    for index in range(num_texts):
        ids = documents[index % len(documents)]
        start = (ids.numel() - num_tokens) * index // num_texts
        texts.append(ids[start : start + num_tokens])
    return texts


def texts_for(model: Model, num_texts: int, num_tokens: int) -> list[torch.Tensor]:
    """Return the texts that a model reads."""
    if model.name == "tiny":
        return held_out_texts(num_texts, num_tokens)
    return [draw_text(model, num_tokens, seed) for seed in range(num_texts)]


def tokens_per_byte(model: Model, texts: Sequence[torch.Tensor]) -> float | None:
    """Return the predicted tokens per byte of the embedded model's texts; None for other models."""
    if model.name != "tiny":
        return None
    tokenizer = load_tokenizer()
    return sum(ids.numel() - 1 for ids in texts) / sum(len(tokenizer.decode(ids[1:]).encode()) for ids in texts)


def logits_of(model: Model, kv_dtype: str, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after each token, `[num_tokens, vocab_size]`, computed at once.

    Raises:
        AssertionError: their bits differ when computed in two parts.
    """
    logits = Text(model, kv_dtype, ids.numel()).append(ids)
    in_parts, cut = Text(model, kv_dtype, ids.numel()), ids.numel() // 3
    again = torch.cat((in_parts.append(ids[:cut]), in_parts.append(ids[cut:])))
    assert not model.is_exact or torch.equal(logits, again), f"{kv_dtype}: a hit changes the answer"
    return logits


def compare(own: Sequence[torch.Tensor], got: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> Row:
    """Compare logits over a pool of the model's own dtype with logits over another pool."""
    expected, logits = torch.cat(tuple(own)), torch.cat(tuple(got))  # [num_tokens, vocab_size]
    apart, own_perplexity = (logits - expected).abs(), _perplexity(expected, texts)
    perplexity = _perplexity(logits, texts)
    return {
        "max_logit_difference": apart.max().item(),
        "mean_logit_difference": apart.mean().item(),
        "kl": kl_div(logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean").item(),
        "top1_agreement": (logits.argmax(-1) == expected.argmax(-1)).float().mean().item(),
        "perplexity": perplexity,
        "perplexity_change": perplexity / own_perplexity - 1,
    }


def _perplexity(logits: torch.Tensor, texts: Sequence[torch.Tensor]) -> float:
    """Return the perplexity of each text's tokens except its first."""
    by_text = torch.split(logits, [ids.numel() for ids in texts])
    losses = [cross_entropy(rows[:-1], ids[1:]) for rows, ids in zip(by_text, texts, strict=True)]
    return float(torch.stack(losses).mean().exp())


def measure(model: Model, num_texts: int, num_tokens: int, rounded: Model | None = None) -> list[Row]:
    """Return a row for each dtype of the pool.

    Args:
        model: the model.
        num_texts, num_tokens: texts that it reads, and their length.
        rounded: the same model with other weights; it adds a row, over a pool of its own dtype.
    """
    texts = texts_for(model, num_texts, num_tokens)
    own = [logits_of(model, "auto", ids) for ids in texts]
    bf16_bytes = dataclasses.replace(model.kv_shape, dtype=torch.bfloat16).token_bytes
    density = tokens_per_byte(model, texts)
    rows: list[Row] = []
    for kv_dtype in KV_DTYPES:
        try:
            shape = model.kv_shape.stored_as(kv_dtype)
        except ConfigError as error:
            print(f"{model.name}: {error}")
            continue
        compared = [(model, own if kv_dtype == "auto" else [logits_of(model, kv_dtype, ids) for ids in texts])]
        if kv_dtype == "auto" and rounded is not None:
            compared.append((rounded, [logits_of(rounded, kv_dtype, ids) for ids in texts]))
        rows += [
            {
                "model": model.name,
                "weights": "int8" if computed is rounded else "auto",
                "head_dim": shape.head_dim,
                "kv_dtype": f"auto ({shape.format.name})" if kv_dtype == "auto" else kv_dtype,
                "token_bytes": shape.token_bytes,
                "tokens_over_bf16": bf16_bytes / shape.token_bytes,
                "std_of_logits": torch.cat(own).std().item(),
                **compare(own, got, texts),
            }
            for computed, got in compared
        ]
    for row in rows:
        row["bits_per_byte"] = None if density is None else math.log2(cast(float, row["perplexity"])) * density
    return rows


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description="Compare a model's logits on the same texts over a pool of each dtype."
    )
    parser.add_argument("--models", nargs="+", default=["tiny", "random"], help="tiny, random or a directory")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random model; default 8")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each text; default 512")
    parser.add_argument("--weights", choices=("auto", "int8"), default="auto", help="also measure these")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        rounded = None if options.weights == "auto" else build_model(name, options.layers, options.weights)
        rows += measure(build_model(name, options.layers), options.texts, options.tokens, rounded)
    print(
        f"{'model':>8} {'weights':>7} {'pool':>11} {'fits':>5}",
        f"{'max':>8} {'mean':>8} {'KL':>9} {'top-1':>7} {'perplexity':>10} {'change':>8}",
    )
    for row in rows:
        print(
            f"{row['model']:>8} {row['weights']:>7} {row['kv_dtype']:>11} {row['tokens_over_bf16']:5.2f}",
            f"{row['max_logit_difference']:8.4f} {row['mean_logit_difference']:8.4f} {row['kl']:9.2e}",
            f"{row['top1_agreement']:7.2%} {row['perplexity']:10.3f} {row['perplexity_change']:+8.2%}",
        )
    if options.json:
        command = shlex.join(["python", "-m", "bench.kv_dtype", *sys.argv[1:]])
        result = {"rows": rows, "texts": options.texts, "tokens": options.tokens, "command": command, **describe_run()}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
