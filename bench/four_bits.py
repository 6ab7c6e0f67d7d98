"""Compares formats that store K and V in 4 bits.

python -m bench.four_bits --json bench/results/four_bits.json

The first table has the error of attention over random vectors with some larger channels, like the keys of real models:
with one scale per vector, the same after rotating the vectors, and with one scale per channel of 64 keys, as in KIVI
(https://arxiv.org/abs/2402.02750). The second table has the perplexity of the embedded model on held-out texts, with
one scale per vector, plain and rotated.

radixkv cannot use scales per channel: such a scale depends on all tokens of its group, so the stored bits of a token
would depend on the tokens after it, and a cache hit would change the answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench.kv_dtype import Row, Text, build_model, compare, texts_for
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.kernels.quantization import INT4, dequantize, quantize
from radixkv.kernels.reference import hadamard_transform

_NUM_KEYS, _NUM_QUERIES, _GROUP_TOKENS, _LARGE_CHANNELS = 1024, 256, 64, 4

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def stored(vectors: torch.Tensor) -> torch.Tensor:
    """Round vectors `[n, dim]` as a pool of 4 bits does."""
    return dequantize(*quantize(vectors, INT4), INT4)


def rotated(vectors: torch.Tensor) -> torch.Tensor:
    """Rotate vectors `[n, dim]`."""
    return hadamard_transform(vectors[:, None], torch.float32)[:, 0]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from all queries over all keys, `[n, dim]` each."""
    weights = torch.softmax(query @ key.T / math.sqrt(query.shape[1]), -1)
    return weights @ value


def with_scales_of_vectors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over vectors with one scale per vector."""
    return attend(query, stored(key), stored(value))


def with_rotated_vectors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over rotated vectors with one scale per vector, as radixkv does."""
    return rotated(attend(rotated(query), stored(rotated(key)), stored(rotated(value))))


def with_scales_of_channels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over keys with one scale per channel of a group of tokens, and values with one scale per vector."""
    groups = [stored(group.T).T for group in torch.split(key, _GROUP_TOKENS)]
    return attend(query, torch.cat(groups), stored(value))


WAYS: dict[str, Way] = {
    "a scale a vector": with_scales_of_vectors,
    "rotated": with_rotated_vectors,
    "a scale a channel (K)": with_scales_of_channels,
}


def error_on_random_vectors(way: Way, dim: int, times: float, seed: int) -> float:
    """Return the relative error of attention if some channels of K are `times` as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, dim, generator=generator) for n in (_NUM_QUERIES, _NUM_KEYS, _NUM_KEYS))
    large = torch.randperm(dim, generator=generator)[:_LARGE_CHANNELS]
    key[:, large] *= times
    query[:, large] /= times  # otherwise these channels alone would determine the attention weights
    expected = attend(query, key, value)
    return float((way(query, key, value) - expected).norm() / expected.norm())


def random_rows(seeds: int) -> list[Row]:
    """Measure all ways on random vectors."""
    rows: list[Row] = []
    for dim in (64, 128):
        for times in (1, 4, 8, 16):
            errors = {
                name: sum(error_on_random_vectors(way, dim, times, seed) for seed in range(seeds)) / seeds
                for name, way in WAYS.items()
            }
            print(f"dim {dim:4} large {times:3}: " + ", ".join(f"{name} {error:.3f}" for name, error in errors.items()))
            rows.append({"head_dim": dim, "times_larger": times, **errors})
    return rows


def model_rows(num_texts: int, num_tokens: int) -> list[Row]:
    """Measure the embedded model over pools of 4 bits."""
    model = build_model("tiny", 0)
    texts = texts_for(model, num_texts, num_tokens)
    own = [Text(model, "auto", ids.numel()).append(ids) for ids in texts]
    rows: list[Row] = []
    for is_rotated in (False, True):
        got = []
        for ids in texts:
            text = Text(model, "int4", ids.numel())
            text.storage.pools = (dataclasses.replace(text.storage.pool, is_rotated=is_rotated),)
            got.append(text.append(ids))
        row: Row = {"is_rotated": is_rotated, **compare(own, got, texts)}
        print(
            f"tiny, {'rotated' if is_rotated else 'plain':>7}: perplexity {row['perplexity_change']:+.2%}, "
            f"KL {row['kl']:.2e}, top-1 {row['top1_agreement']:.2%}"
        )
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.four_bits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="random inputs of each row; default 8")
    parser.add_argument("--texts", type=int, default=16, help="texts of the embedded model; default 16")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each text; default 512")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        **describe_run(),
        "command": shlex.join(["python", "-m", "bench.four_bits", *sys.argv[1:]]),
        "random_vectors": random_rows(options.seeds),
        "tiny": model_rows(options.texts, options.tokens),
    }
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
