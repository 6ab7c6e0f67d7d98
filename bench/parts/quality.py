"""Compares the predictions of a model on held-out text with those of a reference.

`bench.kv_dtype`, `bench.perplexity` and `bench.compression` share this: how they load models, their texts, the
comparison and the command line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div

from bench.parts.result_file import write_result
from bench.training.corpus import held_out_documents
from bench.training.tokenizer import load_tokenizer
from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.batch import PagedBatch
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.storage.device_pool import KVStorage

Row = dict[str, float | int | str | None]

_BLOCK_SIZE = 64


def load(path: str, *, weights: str = "auto", dtype: str = "float32") -> Model:
    """Load a model onto the CPU: `tiny`, a directory, a GGUF file, or a name in the local cache of Hugging Face.

    Args:
        path, weights, dtype: see `ModelConfig`. In float32, activations are not rounded.

    Raises:
        ConfigError: there is no such model, or this processor does not support the weights.
    """
    return load_model(ModelConfig(path=path, device="cpu", weights=weights, dtype=dtype))


def held_out_texts(path: str, num_texts: int, num_tokens: int) -> list[torch.Tensor]:
    """Return pieces of the held-out documents, in turn, from the beginning of a document to its end.

    Args:
        path: as for `load`: the model whose tokenizer divides the texts.
        num_texts, num_tokens: number of pieces, and tokens of each. If the tokenizer puts a token before each text,
            each piece begins with this token.

    Returns:
        int64 `[num_tokens]` each.

    Raises:
        ConfigError: the tokenizer can't be loaded.
    """
    try:
        tokenizer = load_tokenizer() if path == "tiny" else Tokenizer.load(path)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error
    leading_ids = tokenizer.encode("")
    documents = [tokenizer.encode(document.text)[len(leading_ids) :] for document in held_out_documents()]
    texts = []
    for index in range(num_texts):
        ids = documents[index % len(documents)]
        start = (len(ids) - num_tokens) * index // num_texts
        texts.append(torch.tensor([*leading_ids, *ids[start : start + num_tokens - len(leading_ids)]]))
    return texts


class PoolText:
    """A text whose tokens a model computes over a pool of its own.

    Args:
        model: the model.
        kv_dtype: storage format of the pool, as `cache.kv_dtype`.
        max_tokens: capacity of the pool.

    Raises:
        ConfigError: K and V of this model can't be stored in that format.
    """

    def __init__(self, model: Model, kv_dtype: str, max_tokens: int) -> None:
        self._model = model
        num_blocks = -(-max_tokens // _BLOCK_SIZE)
        self._storage = KVStorage(num_blocks, _BLOCK_SIZE, model.kv_shape.stored_as(kv_dtype), model.device)
        self._block_ids = np.arange(num_blocks, dtype=np.int32)
        self._num_tokens = 0

    def append(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the next tokens, int64 `[n]`. Returns the logits after each, float32 `[n, vocab_size]`."""
        start, self._num_tokens = self._num_tokens, self._num_tokens + ids.numel()
        batch = PagedBatch.build([ids.numel()], [self._num_tokens], [self._block_ids], _BLOCK_SIZE)
        step = PagedStep(self._storage.pool, batch, TorchKernels())
        positions = torch.arange(start, self._num_tokens)
        return self._model.forward(ids, positions, step, torch.arange(ids.numel()))[0].float()


@dataclass(frozen=True, slots=True)
class Quality:
    """How much predictions differ from those of the reference.

    Attributes:
        perplexity: perplexity of all tokens except the first of each text.
        perplexity_change: relative to that of the reference; 0.01 is one percent.
        kl: mean KL divergence from the predictions of the reference, in nats.
        same_top: fraction of the tokens after which the most likely token is the same.
    """

    perplexity: float
    perplexity_change: float
    kl: float
    same_top: float


class Comparison:
    """Compares predictions with those of a reference, text by text, so that only one text's logits are in memory."""

    def __init__(self) -> None:
        self._num_positions = self._num_predicted = 0
        self._loss = self._reference_loss = self._kl = self._num_same = 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor) -> None:
        """Add a text.

        Args:
            logits, reference: float32 `[num_tokens, vocab_size]`, after each token.
            ids: the text, int64 `[num_tokens]`.
        """
        self._num_positions += len(ids)
        self._num_predicted += len(ids) - 1
        self._loss += float(cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        self._reference_loss += float(cross_entropy(reference[:-1], ids[1:], reduction="sum"))
        log_probabilities, reference_log_probabilities = logits.log_softmax(-1), reference.log_softmax(-1)
        self._kl += float(kl_div(log_probabilities, reference_log_probabilities, log_target=True, reduction="sum"))
        self._num_same += float((logits.argmax(-1) == reference.argmax(-1)).sum())

    def quality(self) -> Quality:
        """Return the result for all texts."""
        return Quality(
            math.exp(self._loss / self._num_predicted),
            math.exp((self._loss - self._reference_loss) / self._num_predicted) - 1,
            self._kl / self._num_positions,
            self._num_same / self._num_positions,
        )


def row_of(model: Model, quality: Quality, **varied: float | int | str | None) -> Row:
    """Return a row of a result: the model, what was varied, and the quality."""
    return {"model": model.name, **varied, **asdict(quality)}


@dataclass(frozen=True, slots=True)
class Command:
    """The command line of a benchmark of quality.

    Attributes:
        name: the benchmark, as in `python -m bench.NAME`.
        description: what it measures.
        header, columns: what was varied, in the header and in each row of the table; `columns` is a format string of
            the fields of a row.
        num_texts: default number of texts.
        sizes: defaults of further options, by name; a tuple for an option that takes several numbers.
    """

    name: str
    description: str
    header: str
    columns: str
    num_texts: int
    sizes: Mapping[str, int | tuple[int, ...]]

    def run(self, measure: Callable[[str, argparse.Namespace], Iterable[Row]]) -> int:
        """Parse the options, print a table, and write JSON after each model if a file is given. Returns the status.

        Args:
            measure: returns the rows of a model, given its path and the options.
        """
        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}", description=self.description)
        parser.add_argument(
            "--model", nargs="+", default=["tiny"], metavar="MODEL", help="tiny, a directory, a GGUF file or ORG/NAME"
        )
        for name, default in {"texts": self.num_texts, **self.sizes}.items():
            takes_several = isinstance(default, tuple)
            shown_default = " ".join(map(str, default)) if isinstance(default, tuple) else default
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=int,
                nargs="+" if takes_several else None,
                default=default,
                help=f"default {shown_default}",
            )
        parser.add_argument("--json", type=Path, metavar="FILE")
        options = parser.parse_args()
        print(f"{'model':>28} {self.header} {'perplexity':>10} {'change':>8} {'KL':>8} {'same top':>8}")
        sizes = {name: getattr(options, name) for name in ("texts", *self.sizes)}
        rows = []
        try:
            for path in options.model:
                for row in measure(path, options):
                    rows.append(row)
                    print(f"{row['model']:>28}", (self.columns + _QUALITY_COLUMNS).format(**row), flush=True)
                write_result(options.json, f"bench.{self.name}", None, {"rows": rows, **sizes})
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0


_QUALITY_COLUMNS = " {perplexity:10.3f} {perplexity_change:+8.2%} {kl:8.4f} {same_top:8.1%}"
