"""The lower bound of a row: weights and shared keys once per step, limited by arithmetic or memory."""

from __future__ import annotations

import dataclasses

import pytest

from bench.parts.peers.machine_limits import Machine, ModelWork, least_time, measure_machine
from bench.parts.peers.rows import build_rows

INFINITE = float("inf")
LAYERS, HIDDEN, KV_WIDTH, INTERMEDIATE, VOCAB_SIZE = 12, 896, 128, 4864, 32_000  # of the model `llama`
LINEAR_WEIGHTS = LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH + 3 * INTERMEDIATE)
HEAD_WEIGHTS = HIDDEN * VOCAB_SIZE
WEIGHTS = LINEAR_WEIGHTS + HEAD_WEIGHTS
KV_ELEMENTS = LAYERS * 2 * KV_WIDTH  # per token


def test_the_longer_of_memory_and_arithmetic_time_counts() -> None:
    machine = Machine(bytes_per_s=100.0, operations_per_s=10.0, element_bytes=4)
    assert ModelWork(operations=20.0, elements=5.0).min_s(machine) == 2.0
    assert ModelWork(operations=1.0, elements=50.0).min_s(machine) == 2.0


def test_a_decoded_token_reads_weights_and_keys_once() -> None:
    memory_bound = Machine(bytes_per_s=1.0, operations_per_s=INFINITE, element_bytes=2)
    assert least_time(build_rows()["decode"], memory_bound) == 2 * (WEIGHTS + KV_ELEMENTS * (2048 + 64 + 32))


def test_simultaneous_requests_read_weights_and_prefix_once() -> None:
    memory_bound = Machine(bytes_per_s=1.0, operations_per_s=INFINITE, element_bytes=1)
    row = dataclasses.replace(build_rows()["shared"], new_tokens=2)
    prefill, decode = WEIGHTS + KV_ELEMENTS * (2048 + 16 * 64), WEIGHTS + KV_ELEMENTS * (2048 + 16 * 65)
    assert least_time(row, memory_bound) == prefill + decode


def test_only_the_tokens_that_are_not_cached_are_computed() -> None:
    compute_bound = Machine(bytes_per_s=INFINITE, operations_per_s=1.0, element_bytes=4)
    warm, cold = (least_time(build_rows()[name], compute_bound) for name in ("warm", "cold"))
    # Of a warm prompt, the last 64 of 2,112 tokens are computed. A token attends to itself and all tokens before it.
    attention = LAYERS * 4 * HIDDEN  # operations per token and token that it attends to
    assert warm == 2 * 64 * LINEAR_WEIGHTS + 2 * HEAD_WEIGHTS + attention * sum(range(2049, 2113))
    assert cold == 2 * 2112 * LINEAR_WEIGHTS + 2 * HEAD_WEIGHTS + attention * sum(range(1, 2113))


def test_a_call_of_the_demo_is_a_share_of_its_step() -> None:
    compute_bound = Machine(bytes_per_s=INFINITE, operations_per_s=1.0, element_bytes=4)
    rows = build_rows()
    assert least_time(rows["demo-16"], compute_bound) == pytest.approx(least_time(rows["demo-1"], compute_bound))


@pytest.mark.long
def test_a_machine_is_measured() -> None:
    machine = measure_machine("float32", 1)
    assert machine.element_bytes == 4
    assert 0 < machine.bytes_per_s < INFINITE
    assert 0 < machine.operations_per_s < INFINITE
