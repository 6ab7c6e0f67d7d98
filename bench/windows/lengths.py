"""Counts the cached tokens that prompts of several lengths find if windowed layers have their own pool.

python -m bench.windows.lengths --json bench/results/window_lengths.json

Both pools together have the memory of one. Only the bookkeeping runs: caches without a model. Prompts are repeated as
often as Zipf's law says, with 64 new tokens at the end.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import Reach, WindowPool, least_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.namespace import Namespace
from radixkv.storage.kv_layout import layer_shares

_BLOCK_SIZE, _STEP_TOKENS, _OWN_TOKENS = 64, 512, 64
_NAMESPACE = Namespace("model", "tenant")


class Shape(NamedTuple):
    """The layers of a model: like which one, its window, and how many layers have it or not."""

    name: str
    window: int
    num_windowed: int
    num_other: int


SHAPES = (
    Shape("gpt-oss", 128, 1, 1),
    Shape("Gemma 3", 1024, 5, 1),
    Shape("Gemma 2", 4096, 1, 1),
    Shape("Mistral", 4096, 1, 0),
)


RULES = ("one pool", "own pool")  # of windowed layers


def pools_of(shape: Shape, num_blocks: int, rule: str) -> tuple[int, int]:
    """Return the blocks and parts of a cache with the memory of `num_blocks`; 0 parts for one pool."""
    if rule == "one pool":
        return num_blocks, 0
    least = 2 * least_parts(Reach.of_window(shape.window), _BLOCK_SIZE, _STEP_TOKENS)
    shares = layer_shares(shape.window, shape.num_windowed, shape.num_other)
    num_parts = max(int(shares.windowed * num_blocks), least)
    num_all = num_blocks * (shape.num_windowed + shape.num_other) - num_parts * shape.num_windowed
    num_more = num_all // shape.num_other if shape.num_other else int(shares.other * num_blocks)
    return (num_blocks, 0) if num_parts > num_blocks or num_parts >= num_more else (num_more, num_parts)


def reused_share(shape: Shape, num_blocks: int, rule: str, num_tokens: int, num_requests: int, seed: int) -> float:
    """Repeat prompts of one length. Returns the share of their tokens that is reused."""
    blocks, parts = pools_of(shape, num_blocks, rule)
    reach = Reach.of_window(shape.window)
    pools = [WindowPool(blocks, parts, _BLOCK_SIZE, reach, _STEP_TOKENS)] if parts else []
    policy, clock = make_policy("adaptive", blocks), map(float, itertools.count()).__next__
    cache = PrefixCache(blocks, _BLOCK_SIZE, policy=policy, clock=clock, windows=WindowedLayers(pools))
    random = np.random.default_rng(seed)
    num_prompts = 4 * num_blocks * _BLOCK_SIZE // num_tokens  # four times what one pool holds
    chances = 1 / np.arange(1, num_prompts + 1)
    asked = random.choice(num_prompts, num_requests, p=chances / chances.sum()).tolist()
    found = total = 0
    for turn, prompt in enumerate(asked):
        tokens = np.random.default_rng((seed, prompt)).integers(0, 1000, num_tokens)
        own = np.random.default_rng((seed, prompt, turn)).integers(0, 1000, _OWN_TOKENS)
        with cache.lease(_NAMESPACE, np.append(tokens, own).astype("<u4").tobytes()) as lease:
            found, total = found + lease.cached_tokens, total + num_tokens
            compute(lease)
    cache.check()
    return found / total


def compute(lease: Lease) -> None:
    """Publish a prompt step by step, as the engine does."""
    start = lease.cached_tokens
    while start < lease.num_tokens:
        end = min(start + _STEP_TOKENS, lease.num_tokens)
        for holder in lease.windows:
            holder.cover(lease.block_ids, start, end, lease.copy)
        lease.copy = None
        for holder in lease.windows:
            holder.settle(end)
        lease.commit(end)
        start = end


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Count what prompts of several lengths find.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096, 16384], help="of the prompts")
    parser.add_argument("--capacity-tokens", type=int, default=131_072, help="of one pool")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    num_blocks = options.capacity_tokens // _BLOCK_SIZE
    rows = []
    for shape in SHAPES:
        for num_tokens in options.tokens:
            shares = {
                rule: reused_share(shape, num_blocks, rule, num_tokens, options.requests, options.seed)
                for rule in RULES
            }
            rows.append({"model": shape.name, "window": shape.window, "prompt_tokens": num_tokens, "reused": shares})
            text = ", ".join(f"{rule} {share:.3f}" for rule, share in shares.items())
            print(f"{shape.name}, window {shape.window}, prompts of {num_tokens} tokens: reused {text}")
    if options.json:
        called = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "-m", "bench.windows.lengths", *called])
        write_json(options.json, {"rows": rows, "seed": options.seed, "command": command, **describe_run()})


if __name__ == "__main__":
    main()
