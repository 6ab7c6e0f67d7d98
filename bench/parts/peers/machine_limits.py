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
        bytes_per_s: how fast memory is read.
        operations_per_s: additions and multiplications of a matmul, for the faster of two sizes.
        element_bytes: bytes of one element of weights, keys and values.
    """

    bytes_per_s: float
    operations_per_s: float
    element_bytes: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Minimum work of a step of a model.

    Attributes:
        operations: additions and multiplications.
        elements: elements of weights, keys and values that are read.
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


def least_time(row: PeerRow, machine: Machine) -> float:
    """Return the minimum time of one unit of a row, in seconds.

    Per step, the shared prefix is read once for all requests, the own keys of each request once, and the weights once.
    Prompts that are sent one at a time take one step each; concurrent prompts share one step, and so do their tokens.
    """
    model = llama_config() if row.model == "llama" else tiny_config()
    together = row.at_once
    prefill = _step(model, row.shared_tokens, together, row.own_tokens).min_s(machine)
    if row.unit in {"request", "call"}:
        return prefill / together
    middle = row.own_tokens + row.new_tokens // 2  # mean number of a request's own keys in a decode step
    decode = _step(model, row.shared_tokens, together, 1, middle - 1).min_s(machine)
    return decode if row.unit == "token" else prefill + (row.new_tokens - 1) * decode


def _step(model: LlamaConfig, shared: int, requests: int, tokens: int, own_before: int = 0) -> ModelWork:
    """Return the work of a step with `tokens` new tokens of each request."""
    queries, pairs = model.num_attention_heads * model.head_dim, 2 * model.num_key_value_heads * model.head_dim
    linear = model.hidden_size * (2 * queries + pairs + 3 * model.intermediate_size)
    head = model.hidden_size * model.vocab_size
    keys = tokens * (shared + own_before) + tokens * (tokens + 1) / 2  # summed over the tokens of a request
    layer = 2 * requests * tokens * linear + 4 * requests * keys * queries
    operations = model.num_hidden_layers * layer + 2 * requests * head
    kept = model.num_hidden_layers * pairs * (shared + requests * (own_before + tokens))
    return ModelWork(operations, model.num_hidden_layers * linear + head + kept)


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
