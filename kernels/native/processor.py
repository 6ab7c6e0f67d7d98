"""Features of this machine's processor, which determine what is compiled and how libraries compute."""

from __future__ import annotations

from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
# The names of the lines that distinguish processors, on x86 and on ARM (`Features`).
_LINE_NAMES = ("model name", "flags", "Features", "stepping")


def processor_facts(cpuinfo: Path = _CPUINFO) -> list[str]:
    """Return the lines of /proc/cpuinfo that distinguish processors. They are part of the keys of cached choices.

    Args:
        cpuinfo: the file.

    Returns:
        Distinct lines, sorted, independent of the number of processors; empty if the system has no such file.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(_LINE_NAMES)})


def processor_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the extensions that all x86 processors of /proc/cpuinfo have and Linux lets programs use.

    Args:
        cpuinfo: the file.

    Returns:
        Names of extensions, such as `avx2`. Empty if the system has no such file, or the processor is not x86.
    """
    lines = [line.partition(":")[2].split() for line in processor_facts(cpuinfo) if line.startswith("flags")]
    return frozenset(lines[0]).intersection(*lines[1:]) if lines else frozenset()


def processor_capability() -> str:
    """Return AMX, AVX512 or AVX2, or another name if kernels may use none of them. ATEN_CPU_CAPABILITY can limit it."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "AMX" if capability == "AVX512" and torch.cpu._is_amx_tile_supported() else capability
