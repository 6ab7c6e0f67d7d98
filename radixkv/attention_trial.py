"""Attention kernels tried in a process of their own: one that hangs, or breaks the device for its process, breaks that.

python -m radixkv.attention_trial < trial.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from radixkv.attention_check import AttentionKind, check_attention
from radixkv.errors import UnsupportedModel
from radixkv.kv_storage import KVShape

# Starting Python, torch and a GPU takes ten seconds, compiling and running the kernels of a model some more.
_TIMEOUT_S = 120.0
_REFUSED = 1


def try_attention(
    name: str,
    kinds: Collection[AttentionKind],
    dtype: torch.dtype,
    shape: KVShape,
    block_size: int,
    device: torch.device,
    *,
    is_exact: bool,
    command: Sequence[str] = (sys.executable, "-m", "radixkv.attention_trial"),
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Run `check_attention` in another process, for each kind of layer.

    Args:
        name: of the kernels, among `triton_kernels.candidates`.
        kinds: of the model's layers.
        dtype: see `check_attention`, also for all that follow.
        command: what reads the trial.
        timeout_s: after so long it is killed.

    Raises:
        UnsupportedModel: the kernels are wrong, or the process did not come to a good end.
    """
    trial = {
        "name": name,
        "kinds": list(kinds),
        "dtype": _name_of(dtype),
        "shape": [shape.num_layers, shape.num_kv_heads, shape.head_dim, _name_of(shape.dtype)],
        "block_size": block_size,
        "device": str(device),
        "is_exact": is_exact,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(
            command, input=json.dumps(trial), capture_output=True, text=True, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired as late:
        raise UnsupportedModel(f"its trial did not end within {timeout_s:g} s") from late
    if ended.returncode == _REFUSED and ended.stdout.strip():
        raise UnsupportedModel(ended.stdout.strip())
    if ended.returncode:
        last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedModel(f"its trial ended with status {ended.returncode}: {last_line}")


def try_attention_here(
    name: str,
    kinds: Collection[AttentionKind],
    dtype: torch.dtype,
    shape: KVShape,
    block_size: int,
    device: torch.device,
    *,
    is_exact: bool,
) -> None:
    """The same in this process, for those that are tried with it: see `try_attention`."""
    from radixkv.triton_kernels import candidates  # Triton is not there on every platform

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    kernels = candidates(dtype, shape, block_size, capability, is_exact=is_exact)[name]
    for kind in kinds:
        check_attention(kernels, kind, dtype, shape, block_size, device, is_exact=is_exact)


def _run_trial(trial: dict[str, Any]) -> str:
    """Do what `try_attention` asks for; returns why the kernels can't serve, or nothing."""
    num_layers, num_kv_heads, head_dim, stored = trial["shape"]
    try:
        try_attention_here(
            trial["name"],
            [AttentionKind(*kind) for kind in trial["kinds"]],
            getattr(torch, trial["dtype"]),
            KVShape(num_layers, num_kv_heads, head_dim, getattr(torch, stored)),
            trial["block_size"],
            torch.device(trial["device"]),
            is_exact=trial["is_exact"],
        )
    except UnsupportedModel as refusal:
        return str(refusal)
    return ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    refusal = _run_trial(json.load(sys.stdin))
    print(refusal)
    sys.exit(_REFUSED if refusal else 0)
