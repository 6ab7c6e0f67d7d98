"""Measures the cost of exact mode: prefill in exact mode and in fast mode, in turn, with random weights by default.

python -m bench.exactness --json bench/results/exactness.json
python -m bench.exactness --device cuda --shape 8b --layers 32 --dtypes bfloat16        # on a GPU
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.compute.forward import Chunk
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.startup.attention_choice import choose_attention_kernels
from radixkv.startup.attention_trial import try_attention_here
from radixkv.startup.build_engine import make_runner
from radixkv.storage.device_pool import KVStorage

BLOCK_SIZE = 64
VOCAB_SIZE = 32_000
MODES = ("exact", "fast")
_CACHED_TOKENS = 2048  # before each suffix

# The layers of Qwen2 0.5B and of Llama 3 8B.
SHAPES = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def build_runner(
    shape: str, num_layers: int, dtype: torch.dtype, device: torch.device, max_tokens: int, *, is_exact: bool
) -> Runner:
    """Build a runner whose pool holds `max_tokens` tokens, over the embedded model or random layers of this shape."""
    if shape == "tiny":
        module = build_tiny_model(ATTENTION_NAME).to(dtype)
    else:
        config = Qwen2Config(
            vocab_size=VOCAB_SIZE, num_hidden_layers=num_layers, max_position_embeddings=max_tokens, **SHAPES[shape]
        )
        torch.manual_seed(0)
        with device:
            module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    # No fingerprint of the weights: it would copy 16 GB from the GPU.
    model = Model(shape, module, device, is_exact=is_exact, fingerprint="random")
    storage = KVStorage(-(-max_tokens // BLOCK_SIZE), BLOCK_SIZE, model.kv_shape, device)
    kernels = choose_attention_kernels(model, model.kv_shape, BLOCK_SIZE, try_attention_here)
    return make_runner(model, storage, kernels, GraphCapturer(model, kernels, EngineConfig()))


def prefill_s(runner: Runner, num_tokens: int, cached_tokens: int, chunk_tokens: int) -> float:
    """Compute the tokens after the cached ones, chunk by chunk. Returns the seconds until the last chunk was computed.

    The K/V of the cached tokens are whatever the pool contains.
    """
    tokens = np.random.default_rng(0).integers(0, runner.model.vocab_size, num_tokens).astype("<u4").tobytes()
    block_ids = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)
    start_s = time.perf_counter()
    for start in range(cached_tokens, num_tokens, chunk_tokens):
        end = min(num_tokens, start + chunk_tokens)
        runner.run([Chunk(tokens, start, end, block_ids, None, wants_logits=end == num_tokens)])
    return time.perf_counter() - start_s


def measure(
    runners: dict[str, Runner], num_tokens: int, cached_tokens: int, rounds: int, step_tokens: int
) -> dict[str, object]:
    """Return the medians of alternating rounds, and the median of the rounds' ratios of exact to fast."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            seconds[mode].append(prefill_s(runners[mode], num_tokens, cached_tokens, step_tokens))
    medians = {f"{mode}_s": statistics.median(each) for mode, each in seconds.items()}
    ratios = [exact_s / fast_s for exact_s, fast_s in zip(seconds["exact"], seconds["fast"], strict=True)]
    lengths = {"computed_tokens": num_tokens - cached_tokens, "cached_tokens": cached_tokens}
    return {**lengths, **medians, "ratio": statistics.median(ratios)}


def main() -> None:
    """Measure row by row; print each row, and rewrite the file after it."""
    parser = argparse.ArgumentParser(description="Time prefill in exact and in fast mode, in turn.")
    parser.add_argument("--layers", type=int, default=24, help="layers of a random model; default 24")
    parser.add_argument("--shape", choices=("tiny", *SHAPES), default="0.5b")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of each prompt")
    parser.add_argument(
        "--suffixes",
        type=int,
        nargs="*",
        default=[1, 16, 64],
        help=f"numbers of tokens after {_CACHED_TOKENS:,} cached ones",
    )
    parser.add_argument("--step-tokens", type=int, default=512, help="engine.max_step_tokens; default 512")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    result = {
        "rows": rows,
        "shape": options.shape,
        "layers": options.layers,
        "device": str(options.device),
        "rounds": options.rounds,
        "step_tokens": options.step_tokens,
        **describe_run("bench.exactness"),
    }
    longest = max(*options.prompts, _CACHED_TOKENS + max(options.suffixes, default=0))
    for dtype in options.dtypes:
        runners = {
            mode: build_runner(
                options.shape,
                options.layers,
                getattr(torch, dtype),
                options.device,
                longest,
                is_exact=mode == "exact",
            )
            for mode in MODES
        }
        lengths = [(n, 0) for n in options.prompts] + [(_CACHED_TOKENS + n, _CACHED_TOKENS) for n in options.suffixes]
        measure(runners, min(options.step_tokens, longest), 0, 1, options.step_tokens)  # warm up
        for num_tokens, cached_tokens in lengths:
            row = {"dtype": dtype, **measure(runners, num_tokens, cached_tokens, options.rounds, options.step_tokens)}
            rows.append(row)
            print(
                f"{dtype}: {row['computed_tokens']:>5} tokens after {cached_tokens:>4} cached: exact takes "
                f"{row['ratio']:.3f} of fast ({row['exact_s']:.3f} s, {row['fast_s']:.3f} s)",
                flush=True,
            )
            if options.json:
                write_json(options.json, {**result, "is_finished": False})
        del runners
        gc.collect()
    if options.json:
        write_json(options.json, {**result, "is_finished": True})


if __name__ == "__main__":
    main()
