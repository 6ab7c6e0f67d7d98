"""What exact mode costs: prefill in exact and in fast mode, in turn, on a random model of a real one's shape.

python -m bench.exactness --json bench/results/exactness.json
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.environment import describe_run
from radixkv.attention import ATTENTION_NAME, TorchKernels
from radixkv.kv_storage import KVStorage
from radixkv.model import Model
from radixkv.runner import Chunk, Runner

BLOCK_SIZE = 64
VOCAB_SIZE = 32_000
MODES = ("exact", "fast")


def build_runner(num_layers: int, dtype: torch.dtype, max_tokens: int, *, is_exact: bool) -> Runner:
    """A random model with the layers of Qwen2 0.5B, and room for one prompt."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
    )
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    model = Model("random", module, torch.device("cpu"), is_exact=is_exact)
    return Runner(
        model, KVStorage(-(-max_tokens // BLOCK_SIZE), BLOCK_SIZE, model.kv_shape, model.device), TorchKernels()
    )


def prefill_s(runner: Runner, num_tokens: int, cached_tokens: int, chunk_tokens: int) -> float:
    """Seconds for the tokens after the cached ones, chunk by chunk."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_tokens).astype("<u4").tobytes()
    block_ids = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)
    start_s = time.perf_counter()
    for start in range(cached_tokens, num_tokens, chunk_tokens):
        end = min(num_tokens, start + chunk_tokens)
        runner.run([Chunk(tokens, start, end, block_ids, None, wants_logits=end == num_tokens)])
    return time.perf_counter() - start_s


def measure(runners: dict[str, Runner], num_tokens: int, cached_tokens: int, rounds: int) -> dict[str, object]:
    """Medians of rounds in turn, and exact over fast."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            seconds[mode].append(prefill_s(runners[mode], num_tokens, cached_tokens, chunk_tokens=512))
    medians = {f"{mode}_s": statistics.median(each) for mode, each in seconds.items()}
    ratio = statistics.median(exact / fast for exact, fast in zip(*seconds.values(), strict=True))
    return {"computed_tokens": num_tokens - cached_tokens, "cached_tokens": cached_tokens, **medians, "ratio": ratio}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Prefill in exact and in fast mode, in turn.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of each prompt")
    parser.add_argument("--suffixes", type=int, nargs="*", default=[1, 16, 64], help="tokens after a cached 2,048")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    longest = max(*options.prompts, 2048 + max(options.suffixes, default=0))
    for dtype in options.dtypes:
        runners = {
            mode: build_runner(options.layers, getattr(torch, dtype), longest, is_exact=mode == "exact")
            for mode in MODES
        }
        lengths = [(n, 0) for n in options.prompts] + [(2048 + n, 2048) for n in options.suffixes]
        measure(runners, 512, 0, rounds=1)  # warm up
        for num_tokens, cached_tokens in lengths:
            row = {"dtype": dtype, **measure(runners, num_tokens, cached_tokens, options.rounds)}
            rows.append(row)
            print(
                f"{dtype}: {row['computed_tokens']:>5} tokens after {cached_tokens:>4} cached: exact takes "
                f"{row['ratio']:.3f} of fast ({row['exact_s']:.3f} s, {row['fast_s']:.3f} s)",
                flush=True,
            )
        del runners
        gc.collect()
    if options.json:
        result = {
            "rows": rows,
            "layers": options.layers,
            "rounds": options.rounds,
            "command": f"python -m bench.exactness {shlex.join(sys.argv[1:])}",
            **describe_run(),
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
