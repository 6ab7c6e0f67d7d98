"""Attention kernels that an environment variable excludes on this machine.

    RADIXKV_REFUSED_ATTENTION="FlashInfer attention, warp-specialized attention in exact mode"

The variable is for kernels that stall or crash. The trial at start, in a separate process, would detect that at each
start again, and benchmarks call kernels without such a trial. `python -m bench.gpu` sets the variable for its stages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from radixkv.errors import ConfigError

VARIABLE = "RADIXKV_REFUSED_ATTENTION"

FLASHINFER = "FlashInfer attention"
SPECIALIZED = "warp-specialized attention"
DEQUANTIZED = "attention over blocks dequantized first"
SPECIALIZED_DEQUANTIZED = f"warp-specialized {DEQUANTIZED}"
POINTERS = "attention through pointers"
NATIVE = "native attention"
TORCH = "torch's attention"

# The kernels that can be refused. The fallbacks, attention through pointers and PyTorch's attention, cannot.
NAMES = (FLASHINFER, SPECIALIZED, SPECIALIZED_DEQUANTIZED, DEQUANTIZED, NATIVE)
MODES = ("exact", "fast")


def refused_names(mode: str, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Read the names of the kernels that must not be used in a mode.

    >>> sorted(refused_names("fast", {VARIABLE: "FlashInfer attention, warp-specialized attention in exact mode"}))
    ['FlashInfer attention']

    Args:
        mode: one of `MODES`.
        environment: the variables of the process.

    Raises:
        ConfigError: the variable names something else.
    """
    entries = [entry.strip() for entry in environment.get(VARIABLE, "").split(",") if entry.strip()]
    valid = {*NAMES, *(f"{name} in {each} mode" for name in NAMES for each in MODES)}
    for entry in entries:
        if entry not in valid:
            raise ConfigError(
                f"{VARIABLE}: expected some of {', '.join(NAMES)}, each perhaps with 'in exact mode' or 'in fast mode' "
                f"after it, got {entry!r}"
            )
    return frozenset(name for name in NAMES if name in entries or f"{name} in {mode} mode" in entries)


def format_refused(refused: Iterable[tuple[str, str]]) -> str:
    """Write the variable's value.

    >>> format_refused([("FlashInfer attention", "fast"), ("warp-specialized attention", "exact")])
    'FlashInfer attention in fast mode, warp-specialized attention in exact mode'

    Args:
        refused: names and modes.
    """
    return ", ".join(f"{name} in {mode} mode" for name, mode in refused)
