"""Measures lossy compression of K/V: memory, quality and decode speed, for each policy at several budgets.

python -m bench.compression --json build/bench/compression.json

The embedded model reads documents that it was not trained on. The prompt of each is computed as usual. Then the model
reads the rest token by token, once over the whole K/V and once over the entries that each policy keeps, and its
predictions are compared. Memory and quality depend only on the texts; times also depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, kl_div

from bench.compression.reading import Read, Readings
from bench.kv_dtype import build_model, held_out_texts
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.api.compression import Compression, CompressionPolicy


@dataclass(frozen=True, slots=True)
class CompressionRow:
    """One policy at one budget.

    Attributes:
        policy: its name, `none` for the whole K/V.
        positions: `true`, or `renumbered`: counted among the kept entries.
        max_tokens: the budget; None for the whole K/V.
        blocks: blocks of a text at the end.
        kv_bytes: bytes of these blocks.
        perplexity: of the tokens that were read after the prompt.
        kl: mean KL divergence of the predictions from those over the whole K/V, in nats.
        agreement: share of the tokens with the same most likely next token.
        tokens_per_s: tokens of all texts together per second, including the time to choose and drop entries.
    """

    policy: str
    positions: str
    max_tokens: int | None
    blocks: int
    kv_bytes: int
    perplexity: float
    kl: float
    agreement: float
    tokens_per_s: float


def measure(texts: Sequence[torch.Tensor], num_new: int, budgets: Sequence[int]) -> Iterator[CompressionRow]:
    """Yield a row for the whole K/V, and one for each policy and budget."""
    readings = Readings(build_model("tiny", 0), texts, len(texts[0]) - num_new)
    following = torch.stack([text[-num_new:] for text in texts])  # the next token of each token that is read
    whole = readings.read(None)

    def row(policy: str, positions: str, max_tokens: int | None, read: Read) -> CompressionRow:
        log_p, log_whole = read.logits[:, :-1].log_softmax(-1), whole.logits[:, :-1].log_softmax(-1)
        expected = following[:, 1:]
        loss = cross_entropy(log_p.flatten(0, 1), expected.flatten())
        return CompressionRow(
            policy=policy,
            positions=positions,
            max_tokens=max_tokens,
            blocks=read.blocks,
            kv_bytes=read.blocks * readings.block_bytes,
            perplexity=float(loss.exp()),
            kl=float(kl_div(log_p, log_whole, log_target=True, reduction="none").sum(-1).mean()),
            agreement=float((log_p.argmax(-1) == log_whole.argmax(-1)).float().mean()),
            tokens_per_s=following.numel() / read.seconds,
        )

    yield row("none", "true", None, whole)
    for budget in budgets:
        for policy in CompressionPolicy:
            yield row(policy, "true", budget, readings.read(Compression(policy, budget)))
        streaming = Compression(CompressionPolicy.STREAMING_LLM, budget)
        yield row(streaming.policy, "renumbered", budget, readings.read(streaming, is_renumbered=True))
        alone = Compression(CompressionPolicy.STREAMING_LLM, budget, num_sinks=0)
        yield row("window without sinks", "true", budget, readings.read(alone))


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Measure lossy compression of K/V on held-out text.")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens that are read after each prompt")
    parser.add_argument("--budgets", default="64,128,256,512,1024", metavar="N,N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = held_out_texts(options.texts, options.prompt_tokens + options.new_tokens)
    print(f"{'policy':>22}{'positions':>12}{'budget':>7}{'MiB/text':>11}{'perplexity':>11}      KL same top")
    rows = []
    for row in measure(texts, options.new_tokens, [int(each) for each in options.budgets.split(",")]):
        rows.append(row)
        budget = "all" if row.max_tokens is None else str(row.max_tokens)
        print(
            f"{row.policy:>22}{row.positions:>12}{budget:>7}{row.kv_bytes / 2**20:>11.2f}{row.perplexity:>11.2f}"
            f"{row.kl:>8.4f}{row.agreement:>9.1%}  {row.tokens_per_s:.0f} tokens/s",
            flush=True,
        )
    if options.json:
        command = shlex.join(["python", "-m", "bench.compression", *sys.argv[1:]])
        write_json(options.json, {"rows": [asdict(row) for row in rows], "command": command, **describe_run()})


if __name__ == "__main__":
    main()
