from __future__ import annotations

from typing import Any

import pytest

from bench import gguf
from bench.parts.peers.worker_process import PeerMeasurement
from bench.parts.peers.workers.task import Done, Task


class FakeWorker:
    """Takes a given time for each token of a prompt, and for each new one."""

    def __init__(self, prefill_s: float, decode_s: float, resident_bytes: int) -> None:
        self.prefill_s, self.decode_s, self.resident_bytes = prefill_s, decode_s, resident_bytes

    def run(self, task: Task) -> PeerMeasurement:
        [prompt] = task.prompts
        first_s = self.prefill_s * len(prompt)
        wall_s = first_s + self.decode_s * (task.new_tokens - 1)
        return PeerMeasurement(Done(wall_s, [first_s], [[sum(prompt)] * task.new_tokens], [0]), wall_s)


def test_times_are_per_token_and_ratios_are_those_of_radixkv_to_the_peer() -> None:
    workers: Any = {"radixkv": FakeWorker(0.001, 0.02, 10**9), "llama.cpp": FakeWorker(0.002, 0.04, 5 * 10**8)}
    prefill, decode, memory = gguf.measure(workers, gguf.build_rows(200, 8), 2)
    assert prefill["ms"] == pytest.approx({"radixkv": 1, "llama.cpp": 2})
    assert decode["ms"] == decode["cpu_ms"] == pytest.approx({"radixkv": 20, "llama.cpp": 40})
    assert memory["mb"] == {"radixkv": 1000, "llama.cpp": 500}
    assert [each["ratio"] for each in (prefill, decode, memory)] == pytest.approx([0.5, 0.5, 2])
    assert prefill["same_first_tokens"] == 2


def test_a_missing_peer_leaves_no_ratio() -> None:
    workers: Any = {"radixkv": FakeWorker(0.001, 0.02, 10**9)}
    assert [each["ratio"] for each in gguf.measure(workers, gguf.build_rows(200, 8), 1)] == [None] * 3
