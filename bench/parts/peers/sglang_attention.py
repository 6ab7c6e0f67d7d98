"""SGLang's Triton attention for prefill over a cached prefix, loaded from its wheel alone.

Get it with `pip download --no-deps sglang==0.5.23` and unzip the wheel; its `sglang/kernels/ops/attention` is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.parts.peers.sglang_wheel import load_alone


def load_extend_attention(wheel: Path) -> Callable[..., None]:
    """Load `extend_attention_fwd`.

    Args:
        wheel: folder of the unpacked wheel.

    Raises:
        FileNotFoundError: the folder has no such kernel.
    """
    environment = ModuleType("sglang.srt.environ")
    environment.envs = None  # type: ignore[attr-defined]  # read on other hardware only
    module: Any = load_alone(
        wheel,
        "sglang.kernels.ops.attention.extend_attention",
        {"sglang.srt.environ": environment, "sglang.srt.utils": _Hardware("sglang.srt.utils")},
    )
    kernel: Callable[..., None] = module.extend_attention_fwd
    return kernel


class _Hardware(ModuleType):
    """Stands in for SGLang's hardware checks: a CUDA device or an unknown one."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: name == "is_cuda" and torch.cuda.is_available()
