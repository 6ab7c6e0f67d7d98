"""Times steps in which all requests use one LoRA adapter, compared with steps with several adapters and with none.

python -m bench.adapters [--rank 8] [--rounds 15] [--json FILE]

The embedded model runs in exact mode on one thread; times are CPU times of that thread. Steps of all kinds are
measured in turn, and the shortest round of each kind is reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.parts.result_file import write_result
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.model.adapters.adapter_files import AdapterFiles, LowRank, adaptable_layers
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage

_NUM_ADAPTERS = 8
_BLOCK_SIZE = 64
_SCALE = 0.02  # standard deviation of the adapters' weights


class StepKind(NamedTuple):
    """The shape of a step: its number of requests, and the new and cached tokens of each request."""

    num_requests: int
    new_tokens: int
    cached_tokens: int


# Decoding, and the ends of prompts: short questions and longer ones.
_KINDS = (StepKind(8, 1, 512), StepKind(32, 1, 512), StepKind(8, 16, 512), StepKind(8, 64, 512), StepKind(64, 8, 512))

# The adapter of each request of a step, by the index of the request. In `eight and none`, only the requests with odd
# indices have one, so there are four different adapters.
_MIXES: dict[str, Callable[[int], str]] = {
    "none": lambda _: "",
    "one": lambda _: "0",
    "eight": lambda number: str(number % _NUM_ADAPTERS),
    "eight and none": lambda number: str(number % _NUM_ADAPTERS) if number % 2 else "",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all kinds of steps; print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Time steps of one adapter and of eight.")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runner = _build_runner(options.rank)
    print(f"{'requests':>8} {'new':>4} {'cached':>6} " + " ".join(f"{mix:>15}" for mix in _MIXES) + "  one / eight")
    rows = []
    for kind in _KINDS:
        times_ms = _time_mixes(runner, kind, options.rounds)
        rows.append({**kind._asdict(), "ms": times_ms, "ratio": times_ms["one"] / times_ms["eight"]})
        columns = " ".join(f"{times_ms[mix]:12.2f} ms" for mix in _MIXES)
        print(f"{kind.num_requests:8} {kind.new_tokens:4} {kind.cached_tokens:6} {columns}  {rows[-1]['ratio']:.2f}")
    write_result(options.json, "bench.adapters", arguments, {"rank": options.rank, "rows": rows})


def _build_runner(rank: int) -> Runner:
    model = load_model(ModelConfig(device="cpu", max_adapters=_NUM_ADAPTERS))
    assert model.adapted is not None, "adapters are on"
    for number in range(_NUM_ADAPTERS):
        files = _random_adapter(model, str(number), rank)
        model.try_adapter(files)
        model.adapted.adapters.add(files)
    num_blocks = max(kind.num_requests * _num_blocks(kind) for kind in _KINDS)
    kernels = TorchKernels()
    storage = KVStorage(
        num_blocks, _BLOCK_SIZE, model.kv_shape, model.device, is_by_layer=kernels.prefers_layer_major_pool
    )
    return Runner(model, storage, kernels)


def _random_adapter(model: Model, name: str, rank: int) -> AdapterFiles:
    """Return random weights for all adaptable layers. The name, a number, is the seed and stands in for the digest."""
    generator, dtype = torch.Generator().manual_seed(int(name)), model.module.dtype

    def weight(*shape: int) -> torch.Tensor:
        return (_SCALE * torch.randn(shape, generator=generator)).to(dtype)

    layers = {
        layer: LowRank(weight(rank, shape.in_features), weight(shape.out_features, rank))
        for layer, shape in adaptable_layers(model.module).items()
    }
    return AdapterFiles(name, rank, sum(each.num_bytes for each in layers.values()), None, layers)


def _time_mixes(runner: Runner, kind: StepKind, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the shortest step of each mix of adapters."""
    chunks = {
        mix: [_build_chunk(kind, index, adapter_of(index)) for index in range(kind.num_requests)]
        for mix, adapter_of in _MIXES.items()
    }
    times_ms: dict[str, list[float]] = {mix: [] for mix in _MIXES}
    for number in range(rounds + 1):
        for mix in _MIXES:
            start_s = time.thread_time()
            runner.run(chunks[mix])
            if number:  # the first round warms up
                times_ms[mix].append(1e3 * (time.thread_time() - start_s))
    return {mix: min(times) for mix, times in times_ms.items()}


def _build_chunk(kind: StepKind, index: int, adapter: str) -> Chunk:
    end, num_blocks = kind.cached_tokens + kind.new_tokens, _num_blocks(kind)
    tokens = (np.arange(end, dtype="<u4") * 7919 % 256).tobytes()  # arbitrary ones
    blocks: Any = np.arange(index * num_blocks, (index + 1) * num_blocks, dtype=np.int32)
    return Chunk(tokens, kind.cached_tokens, end, blocks, None, wants_logits=True, adapter=adapter)


def _num_blocks(kind: StepKind) -> int:
    return -(-(kind.cached_tokens + kind.new_tokens) // _BLOCK_SIZE)


if __name__ == "__main__":
    main()
