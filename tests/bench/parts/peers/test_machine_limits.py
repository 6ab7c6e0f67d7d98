"""The lower bound of a row: weights and shared keys once per step, limited by arithmetic or memory."""

from __future__ import annotations

import dataclasses

import pytest

from bench.parts.peers.machine_limits import Machine, ModelWork, measure_machine, min_time_s
from bench.parts.peers.rows import build_rows

ENDLESS = float("inf")
WEIGHTS = 12 * 896 * (2 * 896 + 2 * 128 + 3 * 4864) + 896 * 32_000
KEPT = 12 * 2 * 128  # numbers kept for a token


def test_the_longer_of_the_two_counts() -> None:
    machine = Machine(bytes_per_s=100.0, operations_per_s=10.0, element_bytes=4)
    assert ModelWork(operations=20.0, elements=5.0).min_s(machine) == 2.0
    assert ModelWork(operations=1.0, elements=50.0).min_s(machine) == 2.0


def test_a_decoded_token_reads_weights_and_keys_once() -> None:
    reads = Machine(bytes_per_s=1.0, operations_per_s=ENDLESS, element_bytes=2)
    assert min_time_s(build_rows()["decode"], reads) == 2 * (WEIGHTS + KEPT * (2048 + 64 + 32))


def test_requests_at_once_share_weights_and_prefix() -> None:
    reads = Machine(bytes_per_s=1.0, operations_per_s=ENDLESS, element_bytes=1)
    row = dataclasses.replace(build_rows()["shared"], new_tokens=2)
    prefill, decode = WEIGHTS + KEPT * (2048 + 16 * 64), WEIGHTS + KEPT * (2048 + 16 * 65)
    assert min_time_s(row, reads) == prefill + decode


def test_a_prompt_is_computed_from_its_own_tokens_on() -> None:
    computes = Machine(bytes_per_s=ENDLESS, operations_per_s=1.0, element_bytes=4)
    warm, cold = (min_time_s(build_rows()[name], computes) for name in ("warm", "cold"))
    linear, head = 12 * 896 * (2 * 896 + 2 * 128 + 3 * 4864), 896 * 32_000
    seen = sum(range(2049, 2113))
    assert warm == 2 * 64 * linear + 2 * head + 12 * 4 * 896 * seen
    assert cold == 2 * 2112 * linear + 2 * head + 12 * 4 * 896 * sum(range(1, 2113))


def test_a_call_of_the_demo_is_a_share_of_its_step() -> None:
    computes = Machine(bytes_per_s=ENDLESS, operations_per_s=1.0, element_bytes=4)
    rows = build_rows()
    assert min_time_s(rows["demo-16"], computes) == pytest.approx(min_time_s(rows["demo-1"], computes))


@pytest.mark.long
def test_a_machine_is_measured() -> None:
    machine = measure_machine("float32", 1)
    assert machine.element_bytes == 4
    assert 0 < machine.bytes_per_s < ENDLESS
    assert 0 < machine.operations_per_s < ENDLESS
