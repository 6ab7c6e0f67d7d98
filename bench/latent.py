"""Times steps of a model that caches latent vectors (MLA), compared with the same model with K and V of every head.

python -m bench.latent [--layers 2] [--experts 64] [--dtypes float32] [--json FILE]

The model has the shape of DeepSeek-V2-Lite with random weights and few layers, the first of them dense, in exact mode.
Both variants, `latent` and `expanded`, are measured in turn, and the medians are reported, in wall time and in CPU
time; with one thread, CPU time hardly depends on other processes. The prefill without a cached prefix is timed once.
Before a row is timed, the logits of both variants are compared; if they differ, the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DeepseekV2Config

from bench.parts.result_file import write_result
from radixkv.kernels.batch import PagedBatch
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.interface import AttentionCall, AttentionStep
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.model import Model
from radixkv.model.on_cpu import cpu_candidates
from radixkv.storage.device_pool import KVShape, KVStorage

_BLOCK_SIZE = 64
_VOCAB_SIZE = 4096

# Maximum distance of logits, relative to their norm. In half precision, rounding may choose another expert for a token.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class KVVariant(NamedTuple):
    """A variant of storing K and V.

    Attributes:
        storage: its pool.
        wrap: wraps the step that is passed to the model's layers.
        context: returns a context in which the model computes with this variant.
    """

    storage: KVStorage
    wrap: Callable[[AttentionStep], AttentionStep]
    context: Callable[[], AbstractContextManager[None]]


class ExpandedStep:
    """Passes heads whose values are shorter than their keys to a step that requires equal lengths.

    Args:
        step: the wrapped step, whose pool also stores the zeros after the values.
    """

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        layer, query, key, value, scoring = call
        assert value is not None, "every head has values of its own"
        value_dim = value.shape[-1]
        padded_value = pad(value, (0, key.shape[-1] - value_dim))
        return self._step.attend(AttentionCall(layer, query, key, padded_value, scoring))[..., :value_dim]


def config_of(layers: int, experts: int, divisor: int) -> DeepseekV2Config:
    """Return DeepSeek-V2-Lite's configuration with some layers and experts, its widths divided by `divisor`."""
    return DeepseekV2Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=2048 // divisor,
        intermediate_size=10944 // divisor,
        moe_intermediate_size=1408 // divisor,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=experts,
        n_shared_experts=2,
        num_experts_per_tok=min(6, experts),
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512 // divisor,
        qk_nope_head_dim=128 // divisor,
        qk_rope_head_dim=64 // divisor,
        v_head_dim=128 // divisor,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        eos_token_id=1,
        max_position_embeddings=32768,
    )


def model_of(config: DeepseekV2Config, dtype: str) -> Model:
    """Build a model with random weights, in exact mode."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
    ).eval()
    return Model("random", module, torch.device("cpu"))


def variants_of(model: Model, num_tokens: int) -> dict[str, KVVariant]:
    """Return both variants by name, each with a pool for this number of tokens."""
    config: Any = model.module.config
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    shapes = {
        "latent": model.kv_shape,
        "expanded": KVShape(config.num_hidden_layers, config.num_attention_heads, key_dim, model.kv_shape.dtype),
    }
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    pools = {
        name: KVStorage(num_blocks, _BLOCK_SIZE, shape, model.device, is_by_layer=True)
        for name, shape in shapes.items()
    }
    return {
        "latent": KVVariant(pools["latent"], lambda step: step, contextlib.nullcontext),
        "expanded": KVVariant(pools["expanded"], ExpandedStep, model.latent.originals),
    }


class Times(NamedTuple):
    """Wall time and CPU time of a call."""

    wall_ms: float
    processor_ms: float


class Steps:
    """Computes one prompt in several steps.

    Args:
        model: the model.
        variant: how K and V are stored.
        tokens: int64, the prompt.
    """

    def __init__(self, model: Model, variant: KVVariant, tokens: torch.Tensor) -> None:
        self._model = model
        self._variant = variant
        self._tokens = tokens
        self._kernels = next(iter(cpu_candidates(model.attention_uses(model.kv_shape, _BLOCK_SIZE)[0]).values()))
        self._blocks = np.arange(variant.storage.num_blocks, dtype=np.int32)

    def compute(self, start: int, end: int) -> torch.Tensor:
        """Compute the tokens `[start, end)`. The pool must have the K/V of `[0, start)`. Returns the last logits."""
        batch = PagedBatch.build([end - start], [end], [self._blocks], _BLOCK_SIZE)
        step = self._variant.wrap(PagedStep(self._variant.storage.pool, batch, self._kernels))
        with self._variant.context():
            logits, _ = self._model.forward(
                self._tokens[start:end], torch.arange(start, end), step, torch.tensor([end - start - 1])
            )
        return logits[0]


def measure(
    model: Model, dtype: str, cached_tokens: int, new_counts: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Time a cold prefill of the cached tokens once, and steps with new tokens after them.

    Returns:
        A row for each number of new tokens, in milliseconds: the medians `latent_ms` and `expanded_ms` of wall time,
        and `latent_processor_ms` and `expanded_processor_ms` of CPU time; and for the cold prefill `latent_cold_ms`,
        `expanded_cold_ms`, `latent_cold_processor_ms` and `expanded_cold_processor_ms`.

    Raises:
        AssertionError: the logits of both variants differ.
    """
    num_tokens = cached_tokens + max(new_counts)
    tokens = torch.randint(0, _VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(1))
    steps = {name: Steps(model, variant, tokens) for name, variant in variants_of(model, num_tokens).items()}
    cold: dict[str, Any] = {"dtype": dtype, "cached_tokens": cached_tokens}
    for name, each in steps.items():
        cold |= _fields(f"{name}_cold", _time_call(partial(each.compute, 0, cached_tokens)))
    rows = []
    for new_tokens in new_counts:
        end = cached_tokens + new_tokens
        latent, expanded = (steps[name].compute(cached_tokens, end) for name in ("latent", "expanded"))
        distance = float((latent - expanded).norm() / expanded.norm())
        assert distance <= _TOLERANCE[dtype], (
            f"logits: expected the same in both variants, got a distance of {distance:.2g}"
        )
        samples: dict[str, list[Times]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, each in steps.items():
                samples[name].append(_time_call(partial(each.compute, cached_tokens, end)))
        row = {**cold, "new_tokens": new_tokens}
        for name, times in samples.items():
            medians = Times(
                statistics.median(each.wall_ms for each in times),
                statistics.median(each.processor_ms for each in times),
            )
            row |= _fields(name, medians)
        rows.append(row)
    return rows


def _fields(name: str, times: Times) -> dict[str, float]:
    return {f"{name}_ms": times.wall_ms, f"{name}_processor_ms": times.processor_ms}


def _time_call(function: Callable[[], object]) -> Times:
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    function()
    return Times((time.perf_counter() - start_s) * 1e3, (time.process_time() - start_processor_s) * 1e3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Time steps over latent vectors and over K and V of every head.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--cached", type=int, nargs="+", default=[2048, 8192], help="tokens before the step")
    parser.add_argument("--new", type=int, nargs="+", default=[1, 64], help="tokens of the step")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_TOLERANCE), default=["float32"])
    parser.add_argument(
        "--divisor", type=int, default=1, help="divide the widths of the model by this, for a small test"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    print("                      latent, ms       expanded, ms       ratio          cold, s: processor")
    print("dtype     cached  new   wall processor   wall processor   wall processor  latent expanded  bytes/token")
    for dtype in options.dtypes:
        model = model_of(config_of(options.layers, options.experts, options.divisor), dtype)
        token_bytes = {
            name: variant.storage.block_bytes // _BLOCK_SIZE
            for name, variant in variants_of(model, _BLOCK_SIZE).items()
        }
        for cached in options.cached:
            for row in measure(model, dtype, cached, options.new, options.rounds):
                rows.append(row | {f"{name}_token_bytes": num_bytes for name, num_bytes in token_bytes.items()})
                print(_line(row, token_bytes), flush=True)
    write_result(options.json, "bench.latent", arguments, {"rows": rows})


def _line(row: Mapping[str, Any], token_bytes: Mapping[str, int]) -> str:
    wall_ratio = row["latent_ms"] / row["expanded_ms"]
    processor_ratio = row["latent_processor_ms"] / row["expanded_processor_ms"]
    times = "".join(f"{row[f'{name}_ms']:7.1f} {row[f'{name}_processor_ms']:9.1f}" for name in token_bytes)
    cold = " ".join(f"{row[f'{name}_cold_processor_ms'] / 1e3:7.1f}" for name in token_bytes)
    return (
        f"{row['dtype']:9} {row['cached_tokens']:6} {row['new_tokens']:4} {times}"
        f"{wall_ratio:7.2f} {processor_ratio:9.2f} {cold}   {', '.join(map(str, token_bytes.values()))}"
    )


if __name__ == "__main__":
    main()
