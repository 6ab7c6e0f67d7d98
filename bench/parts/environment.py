"""Describes where and when a number was measured: machine, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

_PATIENCE_S = 20.0
_VERSIONED = ("radixkv", "numpy", "torch", "transformers", "triton", "grpcio", "protobuf")


def describe_run() -> dict[str, object]:
    """Describe the run that a result comes from, without its command.

    Outside a git checkout, the environment variable RADIXKV_COMMIT names the commit.
    """
    return {
        "commit": current_commit(Path(__file__).parent) or os.environ.get("RADIXKV_COMMIT"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def describe_machine() -> dict[str, object]:
    """Describe the processor, its cores, the memory, and the GPU if there is one."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages that a result may depend on; None for a missing package."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def current_commit(directory: Path) -> str | None:
    """Return the commit checked out in a directory, with `-dirty` if tracked files differ; None outside git."""
    commit = _output_of(["git", "-C", str(directory), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _output_of(["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changes else commit


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None  # the system does not tell


def _output_of(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:  # nvidia-smi waits for a driver that hangs
        return None
    return done.stdout.strip() if done.returncode == 0 else None
