"""Tries the attention kernels, each in its own process with a time limit, before anything else uses them.

    python -m bench.gpu.trials --json build/trials.json
    python -m bench.gpu.trials --dry-run                  # through Triton's interpreter

The trial is the one by which the service chooses its kernels; see `radixkv/startup/attention_trial.py`. A kernel that
blocks or crashes the device does so during its trial, and not in a later stage.

On a machine that was just started, importing PyTorch and creating a CUDA context can take longer than a trial. So a
separate process does both first, and a trial that times out is repeated alone before its kernel is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu.dry_run import hopper_candidates
from bench.parts.result_file import write_json
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.attention.refused_attention import FLASHINFER, MODES, NAMES, POINTERS, refused_names
from radixkv.model.on_gpu import attention_candidates, flashinfer_candidate
from radixkv.startup.attention_trial import try_attention
from radixkv.storage.device_pool import KVShape

# One layer of an 8B model, and a small one.
_SHAPE, _KIND = KVShape(num_layers=1, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16), AttentionKind(32, None, None)
_DRY_SHAPE, _DRY_KIND = replace(_SHAPE, num_kv_heads=1, head_dim=64), AttentionKind(2, None, None)
_BLOCK_SIZE = 64

Row = dict[str, Any]

_WARM_UP = """
import torch
if torch.cuda.is_available():
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
"""


class KernelTrial(NamedTuple):
    """The name of the kernels of one trial, and the use that they are tried for."""

    name: str
    use: AttentionUse


def uses(device: torch.device, shape: KVShape, kind: AttentionKind, modes: Sequence[str]) -> Iterator[AttentionUse]:
    """List the uses that are tried: a plain pool in each mode, then a quantized one in fast mode."""
    for mode in modes:
        yield AttentionUse((kind,), torch.bfloat16, shape, _BLOCK_SIZE, device, is_exact=mode == "exact")
    if "fast" in modes:
        yield AttentionUse((kind,), torch.bfloat16, shape.stored_as("int8"), _BLOCK_SIZE, device, is_exact=False)


def trials(names: Sequence[str], modes: Sequence[str], *, is_dry_run: bool) -> list[KernelTrial]:
    """List the trials of these kernels, one per kernel and mode, without those that the environment excludes."""
    candidates = hopper_candidates if is_dry_run else attention_candidates
    device = torch.device("cpu" if is_dry_run else "cuda")
    shape, kind = (_DRY_SHAPE, _DRY_KIND) if is_dry_run else (_SHAPE, _KIND)
    by_kernel: dict[tuple[str, bool], KernelTrial] = {}
    for use in uses(device, shape, kind, modes):
        refused = refused_names(_mode(use))
        flashinfer = [FLASHINFER] if flashinfer_candidate(use) is not None else []
        for name in (*candidates(use), *flashinfer):
            if name in names and name not in refused:
                # Kernels that support a plain pool are not tried again over a quantized one.
                by_kernel.setdefault((name, use.is_exact), KernelTrial(name, use))
    return list(by_kernel.values())


def trial_module(*, is_dry_run: bool) -> str:
    """Return the module whose process runs a trial: the service's, or in a dry run one with Triton's interpreter."""
    return "bench.gpu.dry_run" if is_dry_run else "radixkv.startup.attention_trial"


def warm_up(limit_s: float) -> None:
    """Import PyTorch and use the GPU in another process, so that PyTorch's files are cached before the first trial."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # the trials then report the error
        subprocess.run([sys.executable, "-c", _WARM_UP], check=False, timeout=limit_s)


def measure_trials(
    kernel_trials: Sequence[KernelTrial], module: str, limit_s: float, deadline_s: float, workers: int
) -> Iterator[Row]:
    """Run trials concurrently, each in its own process, then repeat those that timed out, one at a time.

    Args:
        kernel_trials: the trials.
        module: module of the process; see `trial_module`.
        limit_s: seconds that a process may take.
        deadline_s: end of all trials, on the clock of `time.monotonic`. A repeated trial gets the time that is left
            until then, if that is less than its limit.
        workers: maximum number of concurrent trials.

    Yields:
        A row for each trial, as soon as it has ended.
    """
    timed_out: list[tuple[KernelTrial, Row]] = []
    with ThreadPoolExecutor(workers) as pool:
        trial_of_future = {pool.submit(_run_trial, trial, module, limit_s): trial for trial in kernel_trials}
        for future in as_completed(trial_of_future):
            row = future.result()
            if row["is_late"]:
                timed_out.append((trial_of_future[future], row))
            else:
                yield row
    for trial, first_row in timed_out:
        remaining_s = min(limit_s, deadline_s - time.monotonic())
        if remaining_s > 0:
            yield {**_run_trial(trial, module, remaining_s), "is_repeated": True}
        else:
            yield first_row


def _run_trial(trial: KernelTrial, module: str, limit_s: float) -> Row:
    start_s, reason = time.monotonic(), None
    try:
        try_attention(*trial, command=(sys.executable, "-m", module), timeout_s=limit_s)
    except UnsupportedModel as refusal:
        reason = str(refusal)
    seconds = time.monotonic() - start_s
    return {
        "kernels": trial.name,
        "mode": _mode(trial.use),
        "pool": trial.use.shape.format.name,
        "is_right": reason is None,
        "is_late": reason is not None and seconds >= limit_s,
        "is_repeated": False,
        "reason": reason,
        "seconds": seconds,
    }


def _mode(use: AttentionUse) -> str:
    return "exact" if use.is_exact else "fast"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, and print and write a row for each as it ends. Always returns 0: a refusal is a result, too."""
    options = _parse(arguments)
    deadline_s = time.monotonic() + options.seconds
    module = options.module or trial_module(is_dry_run=options.dry_run)
    rows: list[Row] = []
    kernel_trials = trials(options.kernels, options.modes, is_dry_run=options.dry_run)
    if not options.dry_run:
        warm_up(options.limit_s)
    for row in measure_trials(kernel_trials, module, options.limit_s, deadline_s, options.workers):
        rows.append(row)
        outcome = "passed" if row["is_right"] else f"REFUSED  {row['reason']}"
        repeated = ", repeated alone" if row["is_repeated"] else ""
        print(
            f"{row['seconds']:>6.1f} s  {row['kernels']}, {row['mode']} mode, {row['pool']}{repeated}: {outcome}",
            flush=True,
        )
        if options.json:
            write_json(options.json, {"rows": rows, "is_finished": len(rows) == len(kernel_trials)})
    if not kernel_trials:
        print("nothing to try")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Try attention kernels in separate processes.")
    default_names = [name for name in (*NAMES, POINTERS) if name != FLASHINFER]
    parser.add_argument("--kernels", nargs="+", choices=(*NAMES, POINTERS), default=default_names)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--limit-s", type=float, default=60, help="seconds for each trial; default 60")
    parser.add_argument(
        "--seconds", type=float, default=600, help="time limit of all trials, including repeated ones; default 600"
    )
    parser.add_argument("--workers", type=int, default=6, help="concurrent trials; default 6")
    parser.add_argument("--module", help="module that runs a trial; by default the service's")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, through Triton's interpreter")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
