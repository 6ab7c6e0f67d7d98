"""Statistics of the device that computes steps. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """How the device computes steps, and its memory.

    Attributes:
        attention: name of the attention kernels that serve.
        captured_steps: CUDA graphs that are used, one for each captured shape of steps.
        dropped_steps: CUDA graphs that are not used, because they failed their check at start or could not be checked.
        used_bytes: used memory of the device, including that of other processes; None on a CPU.
        total_bytes: memory of the device; None on a CPU.
    """

    attention: str
    captured_steps: int
    dropped_steps: int
    used_bytes: int | None
    total_bytes: int | None
