"""Loads SGLang's two radix trees, and its Triton attention for prefill over a cached prefix, without installing SGLang.

They are read from an unpacked wheel: `pip download --no-deps sglang==0.5.23`, then unzip it. The attention needs only
its folder `sglang/kernels/ops/attention`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

_FULL_ATTENTION = 0  # the tree's component; the others are for hybrid models

# The tree written in Python is one module with a few neighbors that need only torch. Their packages would import the
# whole engine, so empty modules replace the packages. The modules in this list are only used in annotations, in events
# and metrics, which are off, and in methods that are not called here.
_STAND_INS = (
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.environ",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.unified_cache.component_type",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
    "sglang.srt.utils.common",
)


class SglangTree(Protocol):
    """The operations that are measured on both trees. Keys are built before the timed part."""

    def key(self, tokens: bytes) -> Any:
        """Convert a prompt to the tree's key."""

    def insert(self, key: Any, indices: torch.Tensor) -> None:
        """Insert a prompt; `indices` is int64, one for each token."""

    def match(self, key: Any) -> Any:
        """Find the longest cached prefix, without the indices of its tokens."""

    def match_with_indices(self, key: Any) -> torch.Tensor:
        """Find the longest cached prefix and collect the int64 indices of its tokens."""

    def evict(self, num_tokens: int) -> int:
        """Evict leaves until at least `num_tokens` are evicted. Returns the number of evicted tokens."""


class SglangRustTree:
    """The tree core written in Rust, with its own LRU.

    Args:
        wheel: folder of the unpacked wheel.
        block_size: tokens per page.
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
        """See `SglangTree`."""
        return _int64_array(tokens)

    def insert(self, key: array[int], indices: torch.Tensor) -> None:
        """See `SglangTree`."""
        step = self._tree.begin_insert(self._native.InsertParamsBinding(key=key, value=indices))
        while step.result is None:
            step = self._tree.resume_insert()
        self._tree.end_insert()

    def match(self, key: array[int]) -> Any:
        """See `SglangTree`."""
        return self._tree.match_prefix(self._native.MatchParamsBinding(key=key))

    def match_with_indices(self, key: array[int]) -> torch.Tensor:
        """See `SglangTree`."""
        match_result = self.match(key)
        indices: torch.Tensor = self._tree.collect_full_device_indices(
            match_result.last_device_node_id, self._tree.root_node_handle()
        )
        return indices

    def evict(self, num_tokens: int) -> int:
        """See `SglangTree`; step by step, as SGLang's cache drives it."""
        evicted_tokens: int = 0
        self._tree.evict_device_start(_FULL_ATTENTION, num_tokens)
        while evicted_tokens < num_tokens:
            step = self._tree.evict_device_next_node(_FULL_ATTENTION, {_FULL_ATTENTION: evicted_tokens})
            if step.node_id is not None:
                evicted_tokens += self._tree.evict_device_leaf(step.node_id).tracker[_FULL_ATTENTION]
            elif not step.made_progress:
                break
        self._tree.evict_device_end(_FULL_ATTENTION)
        return evicted_tokens


class SglangPythonTree:
    """The tree written in Python, with its LRU and without a pool: freed indices are dropped.

    Args:
        wheel: folder of the unpacked wheel.
        block_size: tokens per page.
    """

    def __init__(self, wheel: Path, block_size: int) -> None:
        self._module = _load_python(wheel)
        self._tree = self._module.RadixCache.create_simulated(page_size=block_size, mock_allocator=_NoPool())

    def key(self, tokens: bytes) -> Any:
        """See `SglangTree`."""
        return self._module.RadixKey(_int64_array(tokens))

    def insert(self, key: Any, indices: torch.Tensor) -> None:
        """See `SglangTree`."""
        self._tree.insert(self._module.InsertParams(key=key, value=indices))

    def match(self, key: Any) -> Any:
        """See `SglangTree`."""
        return self._tree.match_prefix(self._module.MatchPrefixParams(key=key))

    def match_with_indices(self, key: Any) -> torch.Tensor:
        """See `SglangTree`."""
        indices: torch.Tensor = self._tree.path_device_indices(self.match(key).last_device_node)
        return indices

    def evict(self, num_tokens: int) -> int:
        """See `SglangTree`."""
        evicted_tokens: int = self._tree.evict(self._module.EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        return evicted_tokens


class _NoPool:
    device = "cpu"

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        """Drop freed indices."""


class _StandIn(ModuleType):
    """A module in which every public name is an empty class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _int64_array(tokens: bytes) -> array[int]:
    return array("q", np.frombuffer(tokens, dtype="<u4").astype(np.int64).tobytes())


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


def _load_python(wheel: Path) -> Any:
    return _load_without_package(
        wheel, "sglang.srt.mem_cache.radix_cache", {name: _StandIn(name) for name in _STAND_INS}
    )


def load_extend_attention(wheel: Path) -> Callable[..., None]:
    """Load `extend_attention_fwd`.

    Args:
        wheel: folder of the unpacked wheel.

    Raises:
        FileNotFoundError: the folder has no such kernel.
    """
    environment = ModuleType("sglang.srt.environ")
    environment.envs = None  # type: ignore[attr-defined]  # read on other hardware only
    module: Any = _load_without_package(
        wheel,
        "sglang.kernels.ops.attention.extend_attention",
        {"sglang.srt.environ": environment, "sglang.srt.utils": _Hardware("sglang.srt.utils")},
    )
    kernel: Callable[..., None] = module.extend_attention_fwd
    return kernel


class _Hardware(ModuleType):
    """Replaces the module of SGLang's hardware checks. Only `is_cuda` can be true."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: name == "is_cuda" and torch.cuda.is_available()


def _load_without_package(wheel: Path, name: str, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Import one module without importing the packages that contain it. Afterwards `sys.modules` has none of SGLang.

    Empty modules replace its parent packages and those of the stand-ins, so no `__init__.py` of SGLang is run.

    Args:
        wheel: folder of the unpacked wheel.
        name: dotted name of the module.
        stand_ins: modules by name that replace other modules.

    Raises:
        FileNotFoundError: the folder has no such module.
    """
    if not (wheel / f"{name.replace('.', '/')}.py").exists():
        raise FileNotFoundError(f"--sglang: expected an unpacked wheel with {name.replace('.', '/')}.py, got {wheel}")
    for dotted_name in (name, *stand_ins):
        for package in _packages(dotted_name):
            sys.modules[package] = empty = ModuleType(package)
            empty.__path__ = [str(wheel / package.replace(".", "/"))]
    sys.modules |= stand_ins
    try:
        return importlib.import_module(name)
    finally:
        for module_name in [module_name for module_name in sys.modules if module_name.partition(".")[0] == "sglang"]:
            del sys.modules[module_name]


def _packages(name: str) -> list[str]:
    """Return the packages above a dotted name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
