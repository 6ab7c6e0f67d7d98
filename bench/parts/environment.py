"""Describes the environment of a measurement: machine, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_COMMAND_TIMEOUT_S = 20.0
_REPORTED_PACKAGES = ("radixkv", "numpy", "torch", "transformers", "triton", "grpcio", "protobuf")
_INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)


def describe_run(module: str, arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Describe the run that produced a result: its command, commit, date, machine and versions.

    Outside a git checkout, the environment variable RADIXKV_COMMIT names the commit.

    Args:
        module: the benchmark, such as `bench.rpc`.
        arguments: its arguments; None for those of this process.
    """
    return {
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": current_commit(Path(__file__).parent) or os.environ.get("RADIXKV_COMMIT"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def describe_machine() -> dict[str, object]:
    """Describe the processor, its cores, the memory, and the GPU if there is one."""
    return {
        **describe_cpu(_read_text(Path("/proc/cpuinfo"))),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_cpu(cpuinfo: str) -> dict[str, object]:
    """Describe a processor. Many share a name such as AMD EPYC; family, model and instruction sets distinguish them.

    Args:
        cpuinfo: the text of /proc/cpuinfo, whose first processor is described; empty on other systems.

    Returns:
        `cpu`, `cpu_family`, `cpu_model`, and `instruction_sets`, by which our kernels and other libraries choose their
        code. Family and model are None if the system does not report them.
    """
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": _parse_number(fields.get("cpu family", "")),
        "cpu_model": _parse_number(fields.get("model", "")),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
    }


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages that a result may depend on; None for a missing package."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def current_commit(directory: Path) -> str | None:
    """Return the commit checked out in a directory, with `-dirty` if tracked files differ; None outside git."""
    commit = output_of(["git", "-C", str(directory), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = output_of(["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changes else commit


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""  # not Linux


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None  # the system does not report it


def output_of(command: Sequence[str]) -> str | None:
    """Run a program. Returns its output; None if it is missing, fails, or blocks, as nvidia-smi may."""
    if shutil.which(command[0]) is None:
        return None
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None
