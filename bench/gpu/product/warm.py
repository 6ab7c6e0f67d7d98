"""Prepares a machine for the product part: imports, one use of the GPU, its rates, a checkpoint, and kernel trials.

python -m bench.gpu.product.warm --json build/warm.json
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.product.run_state import update_state, use_triton_cache
from bench.gpu.product.stage_report import StageReport, open_report
from bench.parts.environment import describe_versions, output_of

if TYPE_CHECKING:  # imported inside the stage, which times the import
    import torch

_STAGE_S, _DRY_STAGE_S = 57.0, 1100.0  # slightly less than the limit of the stage, so that every trial is reported

_CHECKPOINT = "radixkv-bench-llama-3b"
_CHECKPOINT_BYTES = 8_000_000_000  # 5.8 GB, and space for other files
_MEMORY_FILE_SYSTEM = Path("/dev/shm")

_COPY_BYTES, _DRY_COPY_BYTES = 256 << 20, 1 << 20
_NUM_COPIES = 5


def main() -> int:
    """Measure the rows and write them. Returns 1 if one failed; a kernel fails if it is refused or times out."""
    start_s = time.monotonic()
    report = open_report("Prepare a machine for the product part.")
    use_triton_cache()
    with report.row("imports and GPU") as row:
        row |= _import_everything()
        row["text"] = f"{row['seconds']:.1f} s, {row['device']}, torch {row['versions']['torch']}"
    deadline_s = start_s + (_DRY_STAGE_S if report.is_dry_run else _STAGE_S)
    with ThreadPoolExecutor(1) as thread:
        # Trials import PyTorch for some seconds before they use the GPU. Meanwhile, the rates of the GPU are measured.
        future_trials = thread.submit(_run_kernel_trials, deadline_s, is_dry_run=report.is_dry_run)
        _measure_rates(report)
        _write_checkpoint(report)
        trials = future_trials.result()
        for trial in trials:
            result = f"passed in {trial['seconds']:.1f} s" if trial["is_right"] else f"refused: {trial['reason']}"
            report.add({"name": f"{trial['kernels']}, {trial['mode']} mode", "text": result, **trial})
    num_passed = sum(trial["is_right"] for trial in trials)
    return report.finish(f"{num_passed} of {len(trials)} kernel trials passed")


def _import_everything() -> dict[str, Any]:
    """Import the modules that servers import, so that their files are in the page cache, and use the GPU once."""
    start_s = time.monotonic()
    import grpc  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    device = "no GPU"
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        device = torch.cuda.get_device_name()
    return {
        "seconds": time.monotonic() - start_s,
        "device": device,
        "driver": output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "versions": describe_versions(),
    }


def _run_kernel_trials(deadline_s: float, *, is_dry_run: bool) -> list[dict[str, Any]]:
    from bench.gpu.trials import measure_trials, trial_module, trials
    from radixkv.model.attention.refused_attention import MODES, SPECIALIZED

    modes = ["fast"] if is_dry_run else MODES  # Triton's interpreter takes eight seconds for each mode
    kernel_trials = trials([SPECIALIZED], modes, is_dry_run=is_dry_run)
    limit_s = (deadline_s - time.monotonic()) / 2  # a trial that times out is repeated in the other half
    module = trial_module(is_dry_run=is_dry_run)
    return list(measure_trials(kernel_trials, module, limit_s, deadline_s, workers=len(kernel_trials)))


def _measure_rates(report: StageReport) -> None:
    import torch

    from bench.parts.device_time import measure_rates

    with report.row("rates") as row:
        device = torch.device("cpu" if report.is_dry_run else "cuda")
        device_rates = measure_rates(device)
        rates = {
            "matmul_tflops": device_rates.flops_per_s / 1e12,
            "device_gb_per_s": device_rates.bytes_per_s / 1e9,
        }
        num_bytes = _DRY_COPY_BYTES if report.is_dry_run else _COPY_BYTES
        device_buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for kind in ("pinned", "pageable"):
            is_pinned = kind == "pinned" and not report.is_dry_run
            host_buffer = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            rates[f"to_device_{kind}_gb_per_s"] = _copy_gb_per_s(host_buffer, device_buffer)
            rates[f"to_host_{kind}_gb_per_s"] = _copy_gb_per_s(device_buffer, host_buffer)
        row |= rates
        row["text"] = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
        update_state(rates=rates)


def _copy_gb_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the rate of copies between host and device."""
    import torch

    is_cuda = source.is_cuda or target.is_cuda
    target.copy_(source)  # the first copy also allocates pages
    if is_cuda:
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(_NUM_COPIES):
        target.copy_(source, non_blocking=True)
    if is_cuda:
        torch.cuda.synchronize()
    return _NUM_COPIES * source.nbytes / (time.perf_counter() - start_s) / 1e9


def _write_checkpoint(report: StageReport) -> None:
    """Save the model to serve, a random Llama of 2.9 billion parameters. A dry run serves the embedded model."""
    with report.row("checkpoint") as row:
        start_s = time.monotonic()
        if report.is_dry_run:
            from radixkv.model.tiny_model import build_tiny_model

            module = build_tiny_model("sdpa")
            model = "tiny"
        else:
            model, module = _make_random_llama()
        weight_bytes = sum(each.nbytes for each in module.parameters())
        vocab_size = module.config.vocab_size
        row |= {"model": model, "weight_bytes": weight_bytes, "seconds": time.monotonic() - start_s}
        row["text"] = f"{model}, {weight_bytes / 1e9:.2f} GB, {row['seconds']:.1f} s"
        update_state(model=model, vocab_size=vocab_size, weight_bytes=weight_bytes)


def _make_random_llama() -> tuple[str, Any]:
    """Build the model, and save it unless an earlier run on this machine did. Returns its directory and the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.02,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    directory = _checkpoint_parent() / _CHECKPOINT
    if not directory.exists():
        partial = directory.with_name(f"{_CHECKPOINT}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        module.save_pretrained(partial)
        partial.rename(directory)
    return str(directory), module


def _checkpoint_parent() -> Path:
    """Return the folder that has the checkpoint already, or else a folder with enough space, in memory if possible."""
    temporary = Path(tempfile.gettempdir())
    for parent in (_MEMORY_FILE_SYSTEM, temporary):
        if (parent / _CHECKPOINT).exists():
            return parent
    try:
        has_enough_space = shutil.disk_usage(_MEMORY_FILE_SYSTEM).free >= _CHECKPOINT_BYTES
    except OSError:
        has_enough_space = False
    return _MEMORY_FILE_SYSTEM if has_enough_space else temporary


if __name__ == "__main__":
    sys.exit(main())
