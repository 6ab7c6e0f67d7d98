"""Compares the tokens that prompts reuse with one pool for all layers, and with two pools that share the same memory.

python -m bench.windows.border --json bench/results/window_border.json

All caches have the same amount of memory. Only the cache runs, without a model. With `--before FILE`, a result of an
earlier version, the table and the result also have the share of the tokens that the earlier version reused by default.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.parts.result_file import write_result
from bench.windows.traffic import TRAFFICS, Traffic
from radixkv.cache.lease import Lease
from radixkv.cache.part_memory import PartMemory
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.namespace import Namespace
from radixkv.storage.kv_layout import layer_shares

_STEP_TOKENS = 512
_NAMESPACE = Namespace("model", "tenant")

ONE_POOL, SHARED = "one pool", "default"  # layouts of the memory


def cache_of(traffic: Traffic, layout: str) -> PrefixCache:
    """Build a cache with one pool for all layers, or with two pools that share the same memory."""
    shape, block_size = traffic.shape, traffic.block_size
    num_blocks = traffic.capacity_tokens // block_size  # that one pool of all layers holds
    num_block_ids, pools = num_blocks, []
    if layout == SHARED:
        # The windowed layers leave memory to the other layers, so there may be more blocks than in one pool.
        reach = Reach.of_window(shape.window)
        num_dedicated = min_parts(reach, block_size, _STEP_TOKENS) if shape.num_other else num_blocks
        memory = PartMemory(shape.num_windowed, shape.num_other, num_dedicated)
        if shape.num_other:
            num_layer_blocks = num_blocks * (shape.num_windowed + shape.num_other)
            num_block_ids = (num_layer_blocks - num_dedicated * shape.num_windowed) // shape.num_other
        else:
            num_block_ids = int(layer_shares(shape.num_windowed, 0).other * num_blocks)
        pools = [WindowPool(num_block_ids, num_blocks, block_size, reach, _STEP_TOKENS, memory)]
    return PrefixCache(
        num_block_ids,
        block_size,
        policy=make_policy("adaptive", num_blocks),
        probation_share=0.5,
        clock=map(float, itertools.count()).__next__,  # a second later at each reading
        windows=WindowedLayers(pools),
    )


def reused_share(traffic: Traffic, layout: str, seed: int) -> float:
    """Replay the traffic, and return the share of the tokens of the measured prompts that is reused."""
    cache = cache_of(traffic, layout)
    reused_tokens = prompt_tokens = 0
    for prompt in traffic.prompts(seed):
        tokens, cached_tokens = prompt.tokens.astype("<u4").tobytes(), 0
        if prompt.is_only_matched:
            cached_tokens = cache.match(_NAMESPACE, tokens).cached_tokens
        else:
            with cache.lease(_NAMESPACE, tokens) as lease:
                cached_tokens = lease.cached_tokens
                compute(lease)
        if prompt.is_measured:
            reused_tokens += cached_tokens
            prompt_tokens += prompt.tokens.size
    cache.check()
    return reused_tokens / prompt_tokens


def compute(lease: Lease) -> None:
    """Commit a prompt step by step, as the engine does."""
    start = lease.cached_tokens
    while start < lease.num_tokens:
        end = min(start + _STEP_TOKENS, lease.num_tokens)
        for window_lease in lease.windows:
            window_lease.cover(lease.block_ids, start, end, lease.copy)
        lease.copy = None
        for window_lease in lease.windows:
            window_lease.settle(end)
        lease.commit(end)
        start = end


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Count what prompts reuse of windowed layers.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="traffics whose name or model contains this")
    parser.add_argument("--before", type=Path, help="an earlier result to compare with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    before = {} if options.before is None else _defaults_of(options.before)
    rows = []
    for traffic in TRAFFICS:
        key = f"{traffic.shape.name}, {traffic.name}"
        if options.only not in key:
            continue
        reused = {
            layout: float(np.mean([reused_share(traffic, layout, seed) for seed in options.seeds]))
            for layout in (ONE_POOL, SHARED)
        }
        reused |= {"before": before[key]} if key in before else {}
        rows.append({"traffic": key, "window": traffic.shape.window, "reused": reused})
        print(f"{key:58}", ", ".join(f"{layout} {share:.3f}" for layout, share in reused.items()), flush=True)
    write_result(options.json, "bench.windows.border", arguments, {"rows": rows, "seeds": options.seeds})


def _defaults_of(result: Path) -> dict[str, float]:
    return {row["traffic"]: row["reused"][SHARED] for row in json.loads(result.read_text())["rows"]}


if __name__ == "__main__":
    main()
