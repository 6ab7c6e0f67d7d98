"""Minimum time of a row for any engine, given the rates of arithmetic and memory of the machine.

python -m bench.parts.peers.machine_limits float32|bfloat16 THREADS
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from transformers import LlamaConfig

from bench.parts.peers.checkpoint import llama_config
from bench.parts.peers.rows import PeerRow
from radixkv.model.tiny_model import tiny_config

_READ_BYTES = 1 << 30  # larger than any cache of a processor
_PRODUCT_SIZES = ((512, 896, 4864), (2048, 2048, 2048))
_TRIALS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds measured with a number of threads.

    Attributes:
        bytes_per_s: bytes per second that are read from memory.
        operations_per_s: additions and multiplications per second in a matmul, for the faster of two sizes.
        element_bytes: bytes of one element of weights, keys and values.
    """

    bytes_per_s: float
    operations_per_s: float
    element_bytes: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Minimum work of a step of a model.

    Attributes:
        operations: number of additions and multiplications.
        elements: number of elements of weights, keys and values that are read.
    """

    operations: float
    elements: float

    def min_s(self, machine: Machine) -> float:
        """Return the time of the arithmetic or of the memory traffic, whichever is longer."""
        return max(
            self.operations / machine.operations_per_s, self.elements * machine.element_bytes / machine.bytes_per_s
        )


def measure_machine(dtype: str, threads: int) -> Machine:
    """Measure in a separate process, since the number of threads is fixed per process."""
    command = [sys.executable, "-m", "bench.parts.peers.machine_limits", dtype, str(threads)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Machine(**json.loads(printed))


def min_time_s(row: PeerRow, machine: Machine) -> float:
    """Return the minimum time of one unit of a row, in seconds.

    Per step, the shared prefix is read once for all requests, the own keys of each request once, and the weights once.
    Prompts that are sent one at a time take one step each; concurrent prompts share one step, and so do their tokens.
    """
    model = llama_config() if row.model == "llama" else tiny_config()
    prefill_s = _step_work(model, row.shared_tokens, row.at_once, row.own_tokens).min_s(machine)
    if row.unit in {"request", "call"}:
        return prefill_s / row.at_once
    mean_own_keys = row.own_tokens + row.new_tokens // 2  # of one request in a decode step
    decode_s = _step_work(model, row.shared_tokens, row.at_once, 1, mean_own_keys - 1).min_s(machine)
    return decode_s if row.unit == "token" else prefill_s + (row.new_tokens - 1) * decode_s


def _step_work(
    model: LlamaConfig, shared_tokens: int, num_requests: int, num_tokens: int, num_own_before: int = 0
) -> ModelWork:
    """Return the work of a step with `num_tokens` new tokens of each request.

    Args:
        model: the shape of the model.
        shared_tokens: tokens of the prefix that all requests share.
        num_requests: number of requests.
        num_tokens: new tokens of each request.
        num_own_before: tokens of each request between the shared prefix and the new tokens.
    """
    query_width = model.num_attention_heads * model.head_dim
    kv_width = 2 * model.num_key_value_heads * model.head_dim
    layer_weights = model.hidden_size * (2 * query_width + kv_width + 3 * model.intermediate_size)
    head_weights = model.hidden_size * model.vocab_size
    # Keys that the new tokens of one request attend to, summed over these tokens.
    num_keys = num_tokens * (shared_tokens + num_own_before) + num_tokens * (num_tokens + 1) / 2
    layer_operations = 2 * num_requests * num_tokens * layer_weights + 4 * num_requests * num_keys * query_width
    operations = model.num_hidden_layers * layer_operations + 2 * num_requests * head_weights
    kv_elements = model.num_hidden_layers * kv_width * (shared_tokens + num_requests * (num_own_before + num_tokens))
    return ModelWork(operations, model.num_hidden_layers * layer_weights + head_weights + kv_elements)


def _measure(dtype: torch.dtype, threads: int) -> Machine:
    torch.set_num_threads(threads)
    numbers = torch.ones(_READ_BYTES // 4)
    read_s = _shortest_s(numbers.sum)
    rates = []
    for rows, columns, outputs in _PRODUCT_SIZES:
        left, weight = torch.randn(rows, columns).to(dtype), torch.randn(outputs, columns).to(dtype)
        seconds = _shortest_s(partial(torch.nn.functional.linear, left, weight))
        rates.append(2 * rows * columns * outputs / seconds)
    return Machine(_READ_BYTES / read_s, max(rates), dtype.itemsize)


def _shortest_s(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(getattr(torch, sys.argv[1]), int(sys.argv[2])))))
