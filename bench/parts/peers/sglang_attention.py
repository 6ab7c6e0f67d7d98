"""Loads SGLang's Triton attention for prefill over a cached prefix, without installing SGLang.

The kernel is read from an unpacked wheel: `pip download --no-deps sglang==0.5.23`, then unzip it. Only its folder
`sglang/kernels/ops/attention` is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.parts.peers.sglang_wheel import load_without_package


def load_extend_attention(wheel: Path) -> Callable[..., None]:
    """Load `extend_attention_fwd`.

    Args:
        wheel: folder of the unpacked wheel.

    Raises:
        FileNotFoundError: the folder has no such kernel.
    """
    environment = ModuleType("sglang.srt.environ")
    environment.envs = None  # type: ignore[attr-defined]  # read on other hardware only
    module: Any = load_without_package(
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
