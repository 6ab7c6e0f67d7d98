"""Attention kernels tried in a process of their own: one that hangs, or breaks the device for its process, breaks that.

python -m radixkv.attention_trial < trial.json
"""

from __future__ import annotations

import contextlib
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
_DEATH_S = 5.0
_REFUSED = 3  # a Python that fails ends with 1


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
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        raise UnsupportedModel(f"its trial can't be started: {error}") from error
    try:
        printed, errors = process.communicate(json.dumps(trial), timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what is stuck in a driver does not even die
            process.communicate(timeout=_DEATH_S)
        raise UnsupportedModel(f"its trial did not end within {timeout_s:g} s") from late
    if process.returncode == _REFUSED:
        raise UnsupportedModel(printed.strip())
    if process.returncode:
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedModel(f"its trial ended with status {process.returncode}: {last_line}")


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
