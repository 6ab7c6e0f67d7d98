"""Examines a machine with a GPU: versions, clocks, compilers, imports. Each question has its own row.

python -m bench.gpu.first_look --json build/first_look.json
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.parts import ENGINE_IMPORTS, REPORTED_IMPORTS
from bench.gpu.stage import missing_imports
from bench.parts.environment import describe_machine, describe_versions
from bench.parts.result_file import write_json

Row = dict[str, Any]

_LIMIT_S = 30.0  # the first import of PyTorch and transformers on a new machine took 18 s
_MAX_OUTPUT_CHARACTERS = 8_000

_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu,compute_mode,driver_version"


def output_of(command: Sequence[str]) -> str:
    """Run a program and return its output.

    Raises:
        FileNotFoundError, subprocess.SubprocessError: the program is missing, fails, or takes longer than 30 seconds.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]}: not found")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    return done.stdout.strip()[-_MAX_OUTPUT_CHARACTERS:]


def _describe_device() -> str:
    """Import torch, use the GPU once, and describe it."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    total = torch.ones(1024, device="cuda").sum().item()
    if total != 1024:
        raise RuntimeError(f"a sum of 1,024 ones: expected 1024, got {total}")
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return f"{properties}, {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"


# A module that is found may still fail to import, for example transformers if one of its dependencies is missing.
_IMPORT_CODE = (
    "import numpy, safetensors.torch, sortedcontainers, torch, triton, xxhash; "
    "from transformers import AutoModelForCausalLM, LlamaForCausalLM; print('all import')"
)


def _try_imports() -> str:
    """Import the modules that the stages import.

    Raises:
        RuntimeError: a module cannot be imported; the message has the last line of the error.
        subprocess.TimeoutExpired: the imports take longer than 30 seconds.
    """
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_CODE], capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


QUESTIONS: dict[str, Callable[[], object]] = {
    "versions": describe_versions,
    "machine": describe_machine,
    "missing imports": lambda: missing_imports((*ENGINE_IMPORTS, *REPORTED_IMPORTS)),
    "clocks": lambda: output_of(["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv"]),
    "gcc": lambda: output_of(["gcc", "--version"]).splitlines()[0],
    "nvcc": lambda: output_of(["nvcc", "--version"]).splitlines()[-1],
    "ninja": lambda: output_of(["ninja", "--version"]),
    "device": _describe_device,
    "imports": _try_imports,
    "clocks in full": lambda: output_of(["nvidia-smi", "-q", "-d", "CLOCK,COMPUTE,PERFORMANCE"]),
}


def ask(question: str, answer: Callable[[], object]) -> Row:
    """Answer one question. The row has the answer, or the reason why there is none."""
    start_s = time.monotonic()
    row: Row = {"question": question, "is_right": True}
    try:
        row["answer"] = answer()
    except Exception as raised:  # noqa: BLE001 - whatever one question raises, the others are answered
        row |= {"is_right": False, "answer": None, "reason": f"{type(raised).__name__}: {raised}"[:500]}
    return {**row, "seconds": time.monotonic() - start_s}


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer all questions, and print and write a row for each. Always returns 0: a missing answer is a result, too."""
    parser = argparse.ArgumentParser(description="Examine a machine with a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="no effect: the questions are the same on any machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for question, answer in QUESTIONS.items():
        rows.append(ask(question, answer))
        print(f"{question}: {rows[-1]['answer'] if rows[-1]['is_right'] else rows[-1]['reason']}", flush=True)
        if options.json:
            write_json(options.json, {"rows": rows, "is_finished": len(rows) == len(QUESTIONS)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
