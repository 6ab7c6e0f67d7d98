"""The attention kernels that passed a trial, reported to later stages by an environment variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from radixkv.model.attention.refused_attention import MODES, NAMES, NATIVE, VARIABLE, format_refused


class PassedKernels:
    """Attention kernels of a GPU that passed a trial of this run. Other kernels that can be refused are refused."""

    def __init__(self) -> None:
        self._passed: set[tuple[str, str]] = set()
        self._has_tried = False

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the trials of a stage: rows with `kernels`, `mode` and `is_right`. Other rows are ignored."""
        self._has_tried = True
        self._passed |= {(row["kernels"], row["mode"]) for row in rows if "kernels" in row and row["is_right"]}

    def has_passed(self, names: Iterable[str]) -> bool:
        """Whether one of these kernels passed, in any mode."""
        return any((name, mode) in self._passed for name in names for mode in MODES)

    def environment(self) -> dict[str, str]:
        """Return the variable that keeps other processes from using refused kernels; empty before the first `note`."""
        if not self._has_tried:
            return {}
        gpu_kernels = [(name, mode) for name in NAMES if name != NATIVE for mode in MODES]
        return {VARIABLE: format_refused(kernel for kernel in gpu_kernels if kernel not in self._passed)}
