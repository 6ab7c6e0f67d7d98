"""Tries the attention kernels, each in a process of its own with a time limit, before anything else uses them.

    python -m bench.gpu.trials --json build/trials.json
    python -m bench.gpu.trials --dry-run                  # through the interpreter

The trial is the one that decides which kernels serve; see `radixkv/startup/attention_trial.py`. A kernel that hangs or
breaks the device does so here, and in no later stage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu.dry_trial import hopper_candidates
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


class Trial(NamedTuple):
    """Kernels by name, and the use that they are tried for."""

    name: str
    use: AttentionUse


def uses(device: torch.device, shape: KVShape, kind: AttentionKind, modes: Sequence[str]) -> Iterator[AttentionUse]:
    """List the uses that are tried: a plain pool in each mode, then a quantized one in fast mode."""
    for mode in modes:
        yield AttentionUse((kind,), torch.bfloat16, shape, _BLOCK_SIZE, device, is_exact=mode == "exact")
    if "fast" in modes:
        yield AttentionUse((kind,), torch.bfloat16, shape.stored_as("int8"), _BLOCK_SIZE, device, is_exact=False)


def trials(names: Sequence[str], modes: Sequence[str], *, is_dry_run: bool) -> list[Trial]:
    """List the trials of these kernels, each kernel once a mode. What the environment refuses is not tried."""
    candidates = hopper_candidates if is_dry_run else attention_candidates
    device = torch.device("cpu" if is_dry_run else "cuda")
    shape, kind = (_DRY_SHAPE, _DRY_KIND) if is_dry_run else (_SHAPE, _KIND)
    found: dict[tuple[str, bool], Trial] = {}
    for use in uses(device, shape, kind, modes):
        refused = refused_names(_mode(use))
        beside = [FLASHINFER] if flashinfer_candidate(use) is not None else []
        for name in (*candidates(use), *beside):
            if name in names and name not in refused:
                found.setdefault((name, use.is_exact), Trial(name, use))
    return list(found.values())


def measure(given: Sequence[Trial], module: str, limit_s: float, workers: int) -> Iterator[Row]:
    """Run trials side by side, each in a process. Yields a row for each as it ends."""
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(_row, trial, module, limit_s) for trial in given]):
            yield done.result()


def _row(trial: Trial, module: str, limit_s: float) -> Row:
    start_s, reason = time.monotonic(), None
    try:
        try_attention(*trial, command=(sys.executable, "-m", module), timeout_s=limit_s)
    except UnsupportedModel as refusal:
        reason = str(refusal)
    return {
        "kernels": trial.name,
        "mode": _mode(trial.use),
        "pool": trial.use.shape.format.name,
        "is_right": reason is None,
        "reason": reason,
        "seconds": time.monotonic() - start_s,
    }


def _mode(use: AttentionUse) -> str:
    return "exact" if use.is_exact else "fast"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try, print and write a row for each trial as it ends. Returns 0: a kernel that is refused is an answer."""
    options = _parse(arguments)
    module = options.module or ("bench.gpu.dry_trial" if options.dry_run else "radixkv.startup.attention_trial")
    rows: list[Row] = []
    given = trials(options.kernels, options.modes, is_dry_run=options.dry_run)
    for row in measure(given, module, options.limit_s, options.workers):
        rows.append(row)
        outcome = "passed" if row["is_right"] else f"REFUSED  {row['reason']}"
        print(f"{row['seconds']:>6.1f} s  {row['kernels']}, {row['mode']} mode, {row['pool']}: {outcome}", flush=True)
        if options.json:
            write_json(options.json, {"rows": rows, "is_finished": len(rows) == len(given)})
    if not given:
        print("nothing to try")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Try attention kernels in processes of their own.")
    ours = [name for name in (*NAMES, POINTERS) if name != FLASHINFER]
    parser.add_argument("--kernels", nargs="+", choices=(*NAMES, POINTERS), default=ours)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--limit-s", type=float, default=60, help="seconds for each trial; default 60")
    parser.add_argument("--workers", type=int, default=6, help="trials side by side; default 6")
    parser.add_argument("--module", help="module that runs a trial; by default the service's")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, through Triton's interpreter")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
