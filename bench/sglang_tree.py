"""SGLang's Rust radix tree, driven from its wheel alone, to stand beside ours.

Get it with `pip download --no-deps sglang==0.5.23` and unzip the wheel; nothing of SGLang is installed or imported.
"""

from __future__ import annotations

import importlib.util
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FULL_ATTENTION = 0  # the tree's component; the others are for hybrid models


class SglangRustTree:
    """The tree core with its own LRU.

    Args:
        wheel: folder of the unpacked wheel.
        block_size: tokens a page.
    """

    def __init__(self, wheel: Path, block_size: int) -> None:
        self._native = _load_native(wheel)
        self._tree = self._native.RustUnifiedTreeCoreBinding(
            self._native.TreeCoreInitParamsBinding(
                eviction_policy="lru", page_size=block_size, device="cpu", enable_kv_cache_events=False
            ),
            [_FULL_ATTENTION],
        )

    @staticmethod
    def key(tokens: bytes) -> array[int]:
        """The prompt as this tree takes it; made outside of what is timed."""
        return array("q", np.frombuffer(tokens, dtype="<u4").astype(np.int64).tobytes())

    def insert(self, key: array[int], indices: torch.Tensor) -> None:
        """Make a prompt matchable; `indices` is int64, one for each token."""
        step = self._tree.begin_insert(self._native.InsertParamsBinding(key=key, value=indices))
        while step.result is None:
            step = self._tree.resume_insert()
        self._tree.end_insert()

    def match(self, key: array[int]) -> Any:
        """Find the longest cached prefix, without the indices of its tokens."""
        return self._tree.match_prefix(self._native.MatchParamsBinding(key=key))

    def match_with_indices(self, key: array[int]) -> torch.Tensor:
        """Find the longest cached prefix and collect the int64 indices of its tokens."""
        found = self.match(key)
        indices: torch.Tensor = self._tree.collect_full_device_indices(
            found.last_device_node_id, self._tree.root_node_handle()
        )
        return indices

    def evict(self, num_tokens: int) -> int:
        """Evict leaves until `num_tokens` are gone, as SGLang's cache drives it; returns the leaves evicted."""
        evicted_tokens = leaves = 0
        self._tree.evict_device_start(_FULL_ATTENTION, num_tokens)
        while evicted_tokens < num_tokens:
            step = self._tree.evict_device_next_node(_FULL_ATTENTION, {_FULL_ATTENTION: evicted_tokens})
            if step.node_id is not None:
                evicted_tokens += self._tree.evict_device_leaf(step.node_id).tracker[_FULL_ATTENTION]
                leaves += 1
            elif not step.made_progress:
                break
        self._tree.evict_device_end(_FULL_ATTENTION)
        return leaves


def _load_native(wheel: Path) -> Any:
    folder = wheel / "sglang/srt/mem_cache/rust_tree_core"
    files = sorted(folder.glob("mem_cache.*.so"))
    if not files:
        raise FileNotFoundError(f"--sglang: expected an unpacked wheel with {folder}/mem_cache.*.so, got {wheel}")
    spec = importlib.util.spec_from_file_location("mem_cache", files[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
