"""Recording of traffic: what a line contains and what not, and how the size of a recording is bounded."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.namespace import Namespace
from radixkv.planning.simulate import simulate
from radixkv.planning.time_model import MeasuredPrefill
from radixkv.planning.trace import load_trace
from radixkv.scheduling.request import Outcome, Request
from radixkv.telemetry import traffic_recorder
from radixkv.telemetry.traffic_recorder import TrafficRecorder, recorded_traffic
from tests.core_bench import BLOCK_SIZE, Bench


class Recording:
    """A core whose traffic is recorded."""

    def __init__(self, directory: Path, max_bytes: int = 2**20) -> None:
        self.directory = directory
        self.recorder = TrafficRecorder(directory, max_bytes, BLOCK_SIZE, clock=lambda: 1000.0)
        self.bench = Bench(observers=[self.recorder])

    def lines(self) -> list[dict[str, Any]]:
        """End the recording, and return its lines."""
        self.recorder.close()
        files = sorted(self.directory.glob("traffic-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_prompts_that_begin_alike_have_the_same_first_ids(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    for prompt in (range(10), [*range(8), 99, 98, 97], [5, *range(9)]):
        recording.bench.prefill(prompt)
    first, second, third = (line["hash_ids"] for line in recording.lines())
    assert (len(first), len(second), len(third)) == (3, 3, 3)
    assert (first[:2] == second[:2], first[2] == second[2]) == (True, False)
    assert not set(first) & set(third)


def test_a_line_has_lengths_and_no_names(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.bench.prefill(range(9), tenant="acme", session_id="s-1", awaits=Awaits.TOOL)
    recording.bench.prefill(range(9), tenant="acme", session_id="s-1", awaits=Awaits.NOTHING)
    recording.bench.prefill(range(9), tenant="other", session_id="s-1")
    first, last, other = recording.lines()
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (1_000_000, 9, 0)
    assert (first["cached_length"], last["cached_length"], other["cached_length"]) == (0, 8, 0)
    assert (first["loaded_lengths"], first["ttft_ms"] >= 0) == ({}, True)
    assert (first["stop"], last["stop"], "last" in first, last["last"]) == ("tool_use", "other", False, True)
    assert first["hash_ids"] == last["hash_ids"] != other["hash_ids"]
    assert first["session"] == last["session"] != other["session"]
    assert first["tenant"] == last["tenant"] != other["tenant"]
    assert "acme" not in json.dumps(first)
    assert "s-1" not in json.dumps(first)


def test_generated_tokens_have_ids_that_the_next_turn_has(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    generation = recording.bench.generate(range(9), max_new_tokens=6)
    recording.bench.run()
    answer = generation.result(0).token_ids
    recording.bench.prefill([*range(9), *answer, 7, 7])
    first_turn, second_turn = recording.lines()
    assert (first_turn["input_length"], first_turn["output_length"], first_turn["stop"]) == (9, 6, "other")
    assert first_turn["hash_ids"][:2] == second_turn["hash_ids"][:2]
    # The block in which the prompt ends, filled up with the answer.
    assert first_turn["output_hash_ids"][0] == second_turn["hash_ids"][2]
    assert len(first_turn["output_hash_ids"]) == 2


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    for prompt in (range(10), [*range(8), 99, 98, 97]):
        recording.bench.prefill(prompt)
    recording.lines()
    requests = load_trace(tmp_path)
    assert [(each.input_length, each.tokens_per_id) for each in requests] == [(10, BLOCK_SIZE), (11, BLOCK_SIZE)]


def test_a_recording_has_what_the_server_measured(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    tokens = np.arange(10, dtype=np.uint32).tobytes()
    request = Request(PrefillParams(tokens, Caller()), Namespace("fake"), Future(), received_s=100.0)
    request.reuse.cached_tokens, request.reuse.loaded_tokens = 8, {"host": 4, "disk": 0}
    request.times.prefilled_s = 100.25
    recording.recorder.request_ended(request, Outcome.FINISHED, None, 100.5)
    (line,) = recording.lines()
    assert (line["cached_length"], line["loaded_lengths"], line["ttft_ms"]) == (8, {"host": 4}, 250.0)
    (recorded,) = load_trace(tmp_path)
    assert recorded.measured == MeasuredPrefill(8, 10, {"host": 4}, 0.25)


def test_the_ids_of_two_directories_differ_and_those_of_two_recorders_of_one_directory_do_not(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "other", "one"):
        recording = Recording(tmp_path / name)
        recording.bench.prefill(range(10))
        ids.append(recording.lines()[-1]["hash_ids"])
    assert ids[0] == ids[2] != ids[1]
    assert (tmp_path / "one" / "key").stat().st_mode & 0o777 == 0o600
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "one").iterdir())


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    recording = Recording(tmp_path, max_bytes=8 * 1000)
    for number in range(100):
        recording.bench.prefill([number, 1, 2])
    lines = recording.lines()
    assert 20 < len(lines) < 100
    assert sum(file.stat().st_size for file in tmp_path.glob("traffic-*")) <= 8 * 1000
    assert lines[-1]["input_length"] == 3


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "traffic-old.jsonl").write_text("kept\n")
    recording = Recording(tmp_path, max_bytes=8 * 1000)
    for number in range(100):
        recording.bench.prefill([number, 1, 2])
    recording.recorder.close()
    assert (tmp_path / "traffic-old.jsonl").read_text() == "kept\n"


def test_a_recorder_that_is_behind_leaves_requests_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traffic_recorder, "_MAX_WAITING_BYTES", 0)
    recording = Recording(tmp_path)
    recording.recorder._num_waiting_bytes = 1  # as if a request waited
    for _ in range(3):
        recording.bench.prefill(range(10))
    assert recording.lines() == []
    assert recording.recorder.num_dropped == 3
    assert [record.getMessage() for record in caplog.records] == [
        "recording: behind the traffic, 1 requests were left out so far"
    ]


def test_without_a_path_nothing_is_recorded() -> None:
    with recorded_traffic(Config()) as recorder:
        assert recorder is None


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"server\.record_path: expected a directory that can be written, got"):
        TrafficRecorder(file, 2**20, 4)


def test_a_key_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"server\.record_path: expected a key of 32 bytes"):
        TrafficRecorder(tmp_path, 2**20, 4)


def test_a_replay_predicts_what_the_server_reused(tmp_path: Path) -> None:
    """Conversations of growing prompts with generated answers, in a pool that holds a few of them."""
    recording = Recording(tmp_path)
    random = Random(7)
    conversations = [[100 * number + token for token in range(5)] for number in range(12)]
    for _ in range(300):
        number = int(random.triangular(0, len(conversations), 3))
        tokens = conversations[number]
        generation = recording.bench.generate(list(tokens), max_new_tokens=random.randint(1, 9))
        recording.bench.run()
        tokens += [*generation.result(0).token_ids, *(random.randrange(500) for _ in range(random.randint(1, 6)))]
        recording.bench.clock.now_s += random.random()
        if len(tokens) > 90:
            conversations[number] = tokens[: random.randint(4, 30)]
    lines = recording.lines()
    measured = sum(line["cached_length"] for line in lines) / sum(line["input_length"] for line in lines)
    pool = recording.bench.cache.pool
    simulated = simulate(
        load_trace(tmp_path, tokens_per_id=BLOCK_SIZE),
        policy="lru",
        capacity_tokens=pool.num_blocks * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    assert 0.3 < measured < 0.9
    assert abs(simulated.token_hit_rate - measured) <= 0.02
