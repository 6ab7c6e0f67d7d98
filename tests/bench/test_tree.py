import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bench.tree
from bench.parts.peers.sglang import SglangPythonTree
from bench.tree import main
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace

NAMESPACE = Namespace("test")

REQUESTS: list[dict[str, Any]] = [
    {"timestamp": n, "input_length": 512 * 3 - n, "output_length": 1, "hash_ids": [0, n % 4, 100 + n]}
    for n in range(20)
]


def measure(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the report of a run over the trace above."""
    trace, report_file = tmp_path / "trace.jsonl.gz", tmp_path / "tree.json"
    trace.write_bytes(gzip.compress("".join(json.dumps(request) + "\n" for request in REQUESTS).encode()))
    assert main(["--trace", str(trace), "--json", str(report_file), *options]) == 0
    report: dict[str, Any] = json.loads(report_file.read_text())
    return report


def test_every_operation_is_measured_and_the_ratios_are_reported(tmp_path: Path) -> None:
    report = measure(tmp_path, "--leaves", "1000", "2000")
    assert report["prompt_tokens"] == sum(request["input_length"] for request in REQUESTS)
    assert set(report["replay_us"]) == {"insert", "memcmp", "match"}
    assert set(report["hit_us"]) == {"lease_and_release", "match_lease_commit_release"}
    assert set(report["events_us"]) == {
        "insert_without_log",
        "insert_with_log_unread",
        "insert_recorded",
        "publish",
        "publish_a_block",
    }
    assert set(report["evict_us"]) == {"1000", "2000"}
    assert all(value > 0 for value in report["replay_us"].values())
    assert report["ratios"]["match / memcmp"] == round(report["replay_us"]["match"] / report["replay_us"]["memcmp"], 2)
    assert "evict at 2,000 / 1,000 leaves" in report["ratios"]


def count_calls_of_a_hit(prefix_tokens: int) -> int:
    """Return how many function calls a request of 64 new tokens after a cached prefix takes in the cache."""
    prefix = np.arange(prefix_tokens, dtype="<u4").tobytes()
    cache = PrefixCache(prefix_tokens // 64 + 8, 64)
    with cache.lease(NAMESPACE, prefix) as lease:
        lease.commit(prefix_tokens)
    prompts = [prefix + np.full(64, first, dtype="<u4").tobytes() for first in range(3)]
    for prompt in prompts[:2]:  # the first one splits the node of the prefix
        process(cache, prompt)
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        process(cache, prompts[2])
    finally:
        sys.setprofile(None)
    return num_calls


def process(cache: PrefixCache, prompt: bytes) -> None:
    """Match, lease, commit and release a prompt, like a request."""
    cache.match(NAMESPACE, prompt)
    with cache.lease(NAMESPACE, prompt) as lease:
        lease.commit(lease.num_tokens)


def test_the_work_of_a_request_does_not_grow_with_its_cached_tokens() -> None:
    assert count_calls_of_a_hit(8_192) == count_calls_of_a_hit(131_072) < 300


class FakePeerTree:
    """Imitates the tree of a peer with a list of prompts."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prompts: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def key(self, tokens: bytes) -> tuple[int, ...]:
        return tuple(np.frombuffer(tokens, dtype="<u4").tolist())

    def insert(self, key: tuple[int, ...], indices: torch.Tensor) -> None:
        assert len(key) == indices.numel()
        self.prompts.append((key, indices))

    def match(self, key: tuple[int, ...]) -> torch.Tensor:
        indices = next(indices for other, indices in self.prompts if other == key)
        return indices[: len(key) // self.block_size * self.block_size]

    match_with_indices = match

    def evict(self, num_tokens: int) -> int:
        self.prompts.pop()
        return num_tokens


def test_peers_are_measured_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.tree, "_sglang_trees", lambda _: dict.fromkeys(("sglang", "sglang_python"), FakePeerTree))
    report = measure(tmp_path, "--leaves", "1000", "--sglang", str(tmp_path))
    replay = report["replay_us"]
    for peer in ("sglang", "sglang_python"):
        assert {f"{peer}_{name}" for name in ("insert", "match", "match_with_indices")} < set(replay)
        assert set(report[f"{peer}_evict_us"]) == {"1000"}
        ratio = report["ratios"][f"{peer.replace('_', ' ')} insert / insert"]
        assert ratio == round(replay[f"{peer}_insert"] / replay["insert"], 2)


FAKE_RADIX_CACHE = """
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.mem_cache.allocator import Allocator  # the engine, which must not be imported
from sglang.srt.mem_cache.neighbour import NEIGHBOUR  # a file that imports nothing

RadixKey = list

@dataclass
class InsertParams:
    key: Any
    value: Any

@dataclass
class MatchPrefixParams:
    key: Any
    last_device_node: Any = None

@dataclass
class EvictParams:
    num_tokens: int
    num_tokens_evicted: int = 0

class RadixCache:
    @classmethod
    def create_simulated(cls, page_size, mock_allocator):
        cache = cls()
        cache.allocator, cache.known = mock_allocator, []
        assert (page_size, NEIGHBOUR) == (4, 7)
        return cache

    def insert(self, params):
        self.known.append((params.key, params.value))

    def match_prefix(self, params):
        return MatchPrefixParams(params.key, dict((tuple(key), value) for key, value in self.known)[tuple(params.key)])

    def path_device_indices(self, node):
        return node

    def evict(self, params):
        key, value = self.known.pop()
        self.allocator.free_segment(value, start_pos=0)
        return EvictParams(params.num_tokens, len(key))
"""


def test_the_python_tree_is_loaded_from_the_wheel_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sglang/srt/mem_cache"
    (folder / "allocator").mkdir(parents=True)
    for package in ("sglang", "sglang/srt", "sglang/srt/mem_cache", "sglang/srt/mem_cache/allocator"):
        (tmp_path / package / "__init__.py").write_text("raise ImportError('this is the engine')")
    (folder / "neighbour.py").write_text("NEIGHBOUR = 7")
    (folder / "radix_cache.py").write_text(FAKE_RADIX_CACHE)
    tree = SglangPythonTree(tmp_path, 4)
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
    key = tree.key(np.arange(8, dtype="<u4").tobytes())
    tree.insert(key, torch.arange(8))
    assert tree.match_with_indices(key).tolist() == list(range(8))
    assert tree.evict(5) == 8
