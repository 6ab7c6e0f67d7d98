"""Counts the blocks that sliding-window layers need for one long prompt, and the tokens that later prompts reuse.

python -m bench.windows --json bench/results/windows.json

A random model shaped like Gemma 3, with five windowed layers for each layer of full attention, serves a prompt through
the real engine: with one pool for all layers, and with windowed layers in a separate pool that is as small as possible.
The answers must be bitwise identical. Nothing is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from bench.parts.result_file import write_result
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import Reach, min_parts
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.observer import Observer
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.model import Model
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request
from radixkv.startup.windowed_layers import windows_of
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_groups import LayerGroups

_VOCAB_SIZE = 1000


def model_of(num_layers: int, window: int, max_tokens: int) -> Model:
    """Build a random model in exact mode, every sixth layer of which has no window."""
    config = Gemma3TextConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=window,
        max_position_embeddings=max_tokens,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(num_layers)],
    )
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    return Model("random", module, torch.device("cpu"))


class StepCounter(Observer):
    """Counts the blocks of windowed layers that each step needs.

    Attributes:
        needed: blocks that requests use, for each step.
        cached: cached blocks that no request uses, for each step.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.needed: list[int] = []
        self.cached: list[int] = []

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Count the blocks of windowed layers after a step."""
        for pool in self._cache.windows.pools:
            self.needed.append(pool.num_pinned)
            self.cached.append(pool.num_unpinned)


class WindowedServer:
    """An engine over the model, driven step by step.

    Args:
        model: the model.
        num_blocks, block_size: number of blocks of the pool, and tokens per block.
        step_tokens: maximum number of tokens per step.
        num_parts: blocks of the separate pool of the windowed layers; None for one pool.
    """

    def __init__(self, model: Model, num_blocks: int, block_size: int, step_tokens: int, num_parts: int | None) -> None:
        groups = None if num_parts is None else LayerGroups.of(model.windows, model.max_tokens)
        self.storage = KVStorage(
            num_blocks,
            block_size,
            model.kv_shape,
            model.device,
            is_by_layer=True,
            groups=groups,
            num_parts=num_parts or 0,
        )
        self.cache = PrefixCache(num_blocks, block_size, windows=windows_of(self.storage, step_tokens))
        self.counter = StepCounter(self.cache)
        runner = Runner(model, self.storage, TorchKernels())
        config = EngineConfig(max_step_tokens=step_tokens)
        self._core = EngineCore.build(runner, self.cache, config, observers=[self.counter])

    def prefill(self, prompt: Sequence[int]) -> PrefillResult:
        """Prefill one prompt."""
        future: Future[PrefillResult] = Future()
        params = PrefillParams(np.array(prompt, dtype="<u4").tobytes(), return_logits=True)
        self._core.submit(Request(params, Namespace("random"), future, time.monotonic()))
        while not future.done():
            self._core.step()
        self.cache.check()
        return future.result()


def measure(model: Model, num_tokens: int, block_size: int, step_tokens: int) -> dict[str, Any]:
    """Prefill one prompt of this length and three later prompts with both kinds of pools.

    Raises:
        AssertionError: their answers differ.
    """
    groups = LayerGroups.of(model.windows, model.max_tokens)
    reach = Reach.of_window(groups.window)
    num_blocks = 2 * -(-num_tokens // block_size)
    num_parts = min_parts(reach, block_size, step_tokens)
    one_pool = WindowedServer(model, num_blocks, block_size, step_tokens, None)
    two_pools = WindowedServer(model, num_blocks, block_size, step_tokens, num_parts)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, _VOCAB_SIZE, num_tokens).tolist()
    new_tokens = rng.integers(0, _VOCAB_SIZE, 64).tolist()
    prompts = {
        "the long prompt": prompt,
        "its next turn": prompt + new_tokens,
        "the same prompt": prompt,
        "a branch in its middle": prompt[: num_tokens // 2] + new_tokens,
    }
    rows = []
    for name, tokens in prompts.items():
        one_pool_result, two_pools_result = one_pool.prefill(tokens), two_pools.prefill(tokens)
        assert one_pool_result.logits is not None
        assert two_pools_result.logits is not None
        assert np.array_equal(one_pool_result.logits, two_pools_result.logits), f"{name}: expected the same bits"
        rows.append(
            {
                "prompt": name,
                "prompt_tokens": len(tokens),
                "one_pool_cached_tokens": one_pool_result.usage.cached_tokens,
                "cached_tokens": two_pools_result.usage.cached_tokens,
                "miss_reason": two_pools_result.miss_reason.value,
                "most_needed_blocks": max(two_pools.counter.needed),
                "most_blocks_in_use": max(
                    needed + cached
                    for needed, cached in zip(two_pools.counter.needed, two_pools.counter.cached, strict=True)
                ),
            }
        )
        two_pools.counter.needed.clear()
        two_pools.counter.cached.clear()
    return {
        "num_tokens": num_tokens,
        "window": groups.window,
        "step_tokens": step_tokens,
        "block_size": block_size,
        "windowed_layers": groups.num_windowed,
        "layers": len(groups.are_windowed),
        "one_pool_blocks": -(-num_tokens // block_size),
        "windowed_pool_blocks": num_parts,
        "bound_blocks": -(-(groups.window - 1 + step_tokens) // block_size) + 1,
        "hit_blocks": -(-(groups.window - 1) // block_size),
        "one_pool_bytes": one_pool.storage.num_bytes,
        "bytes": two_pools.storage.num_bytes,
        "prompts": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Count the blocks that windowed layers need.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="lengths of the long prompts")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    model = model_of(options.layers, options.window, 2 * max(options.tokens))
    results = []
    for num_tokens in options.tokens:
        result = measure(model, num_tokens, options.block_size, options.step_tokens)
        results.append(result)
        print(
            f"{num_tokens} tokens, window {options.window}, steps of {options.step_tokens}: windowed layers need at "
            f"most {result['prompts'][0]['most_needed_blocks']} blocks, bound {result['bound_blocks']}, one pool "
            f"{result['one_pool_blocks']}"
        )
        for row in result["prompts"]:
            print(
                f"  {row['prompt']:24} {row['cached_tokens']:6} cached, {row['one_pool_cached_tokens']:6} with one "
                f"pool, {row['most_needed_blocks']:3} blocks needed  {row['miss_reason']}"
            )
    write_result(options.json, "bench.windows", arguments, {"rows": results})


if __name__ == "__main__":
    main()
