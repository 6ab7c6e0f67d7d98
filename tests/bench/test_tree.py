import json
from pathlib import Path

from bench.tree import main


def test_it_measures_every_operation_and_states_the_ratios(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": n, "input_length": 512 * 3 - n, "output_length": 1, "hash_ids": [0, n % 4, 100 + n]}
        for n in range(20)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    report_file = tmp_path / "tree.json"
    assert main(["--trace", str(trace), "--leaves", "1000", "2000", "--json", str(report_file)]) == 0
    report = json.loads(report_file.read_text())
    assert report["prompt_tokens"] == sum(request["input_length"] for request in requests)
    assert set(report["replay_us"]) == {"insert", "memcmp", "match"}
    assert set(report["hit_us"]) == {"lease_and_release", "match_lease_commit_release"}
    assert set(report["evict_us"]) == {"1000", "2000"}
    assert all(value > 0 for value in report["replay_us"].values())
    assert report["ratios"]["match / memcmp"] == round(report["replay_us"]["match"] / report["replay_us"]["memcmp"], 2)
    assert "evict at 2,000 / 1,000 leaves" in report["ratios"]


def test_a_request_over_8k_cached_tokens_costs_less_than_200_us() -> None:
    from bench.tree import measure_hit

    best = min(measure_hit(block_size=64)["match_lease_commit_release"] for _ in range(3))
    assert best < 200
