"""Tries attention kernels in a separate process, so that a kernel that stalls or crashes does not affect the server.

python -m radixkv.startup.attention_trial < trial.json
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionKernels, AttentionKind, AttentionUse
from radixkv.model.attention.refused_attention import FLASHINFER
from radixkv.model.on_gpu import attention_candidates, flashinfer_candidate
from radixkv.startup.attention_check import check_attention
from radixkv.storage.device_pool import KVShape

# Starting Python, PyTorch and a GPU takes ten seconds; compiling and running the kernels takes additional time.
_TIMEOUT_S = 120.0
# When a shape is first used, FlashInfer compiles kernels with nvcc for minutes. The result is cached on disk.
_BUILD_TIMEOUT_S = 900.0
_KILL_TIMEOUT_S = 5.0
_REFUSED_STATUS = 3  # exit status if the kernels cannot serve; Python itself fails with 1


def try_attention(
    name: str,
    use: AttentionUse,
    *,
    command: Sequence[str] = (sys.executable, "-m", "radixkv.startup.attention_trial"),
    timeout_s: float | None = None,
) -> None:
    """Run `check_attention` in another process.

    Args:
        name: name of the kernels in `triton_kernels.candidates`, or FlashInfer's.
        use: the requirements of the model.
        command: command of the process, which reads the trial from its standard input.
        timeout_s: the process is killed after this time; None for two minutes, or for fifteen minutes with FlashInfer.

    Raises:
        UnsupportedModel: the kernels are wrong, or the process failed or did not end in time.
    """
    if timeout_s is None:
        timeout_s = _BUILD_TIMEOUT_S if name == FLASHINFER else _TIMEOUT_S
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
        raise UnsupportedModel(f"its trial can't be started: {error.filename}: {error.strerror}") from error
    try:
        printed, errors = process.communicate(_to_json(name, use), timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that is blocked in a driver can't be killed
            process.communicate(timeout=_KILL_TIMEOUT_S)
        raise UnsupportedModel(f"its trial did not end within {timeout_s:g} s") from error
    if process.returncode == _REFUSED_STATUS:
        raise UnsupportedModel(printed.strip())
    if process.returncode:
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedModel(f"its trial ended with status {process.returncode}: {last_line}")


def try_attention_here(name: str, use: AttentionUse) -> None:
    """Run `check_attention` in this process; see `try_attention`."""
    check_attention(_find_kernels(name, use), use)


def _find_kernels(name: str, use: AttentionUse) -> AttentionKernels:
    if name != FLASHINFER:
        return attention_candidates(use)[name]
    flashinfer = flashinfer_candidate(use)
    if flashinfer is None:
        raise UnsupportedModel("it is not installed, or does not support this model, pool or GPU")
    return flashinfer


def _to_json(name: str, use: AttentionUse) -> str:
    """Write a trial as JSON."""
    shape = use.shape
    return json.dumps(
        {
            "name": name,
            "kinds": use.kinds,
            "dtype": _dtype_name(use.dtype),
            "shape": [shape.num_layers, shape.num_kv_heads, shape.head_dim, _dtype_name(shape.dtype), shape.is_latent],
            "block_size": use.block_size,
            "device": str(use.device),
            "is_exact": use.is_exact,
        }
    )


def _from_json(trial: str) -> tuple[str, AttentionUse]:
    """Parse the result of `_to_json`."""
    values = json.loads(trial)
    num_layers, num_kv_heads, head_dim, kv_dtype, is_latent = values["shape"]
    return values["name"], AttentionUse(
        kinds=tuple(AttentionKind(*kind) for kind in values["kinds"]),
        dtype=getattr(torch, values["dtype"]),
        shape=KVShape(num_layers, num_kv_heads, head_dim, getattr(torch, kv_dtype), is_latent),
        block_size=values["block_size"],
        device=torch.device(values["device"]),
        is_exact=values["is_exact"],
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run_trial(trial: str) -> str:
    """Run a trial. Returns the reason why the kernels cannot serve; empty if they can."""
    try:
        try_attention_here(*_from_json(trial))
    except UnsupportedModel as refusal:
        return str(refusal)
    return ""


def main() -> int:
    """Run the trial on standard input, and print the reason if the kernels cannot serve. Returns the exit status."""
    refusal = _run_trial(sys.stdin.read())
    print(refusal)
    return _REFUSED_STATUS if refusal else 0


if __name__ == "__main__":
    sys.exit(main())
