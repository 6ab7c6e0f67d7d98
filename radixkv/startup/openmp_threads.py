"""Settings of the OpenMP threads that PyTorch uses on a CPU. Nothing here imports torch.

The C++ kernels have a thread pool of their own (`kernels/native/threads.cpp`). PyTorch's own operations, which models
without C++ kernels use, run on OpenMP threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import MutableMapping
from pathlib import Path

_PAUSE_HARD = 2  # omp_pause_hard of omp.h

# Iterations of a spinning thread in about 100 us. By default, GNU's OpenMP spins for 300,000 iterations: 20 ms on an
# Intel processor, whose `pause` has taken 140 cycles since Skylake, and 6 ms on others. See `bound_spinning`.
_SPIN_COUNT_INTEL = 1_500
_SPIN_COUNT = 5_000
_CPUINFO = Path("/proc/cpuinfo")

_log = logging.getLogger(__name__)


def bound_spinning(environment: MutableMapping[str, str], cpuinfo: Path = _CPUINFO) -> None:
    """Let threads of GNU's OpenMP spin for about 100 microseconds before they sleep, instead of several milliseconds.

    A spinning thread occupies a core that other threads could use, including the thread for which it waits. This was
    measured when the C++ kernels still ran on OpenMP: next to two busy processes on two cores, a decoded token of a
    model of 135M parameters took 14 times as long as on a quiet machine, and 1.9 times as long with this bound. Without
    any spinning it took 1.2 times as long on a quiet machine.

    OpenMP reads the variable `GOMP_SPINCOUNT` when it is loaded, so call this before torch is imported. Nothing changes
    if the user has set `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY`.

    Args:
        environment: `os.environ`, to which `GOMP_SPINCOUNT` may be added.
        cpuinfo: file that describes the processors.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        try:
            is_intel = "GenuineIntel" in cpuinfo.read_text(encoding="utf-8")
        except OSError:
            is_intel = False
        environment["GOMP_SPINCOUNT"] = str(_SPIN_COUNT_INTEL if is_intel else _SPIN_COUNT)


def end_openmp_threads() -> bool:
    """End the OpenMP threads that PyTorch has started for the calling thread. They start again when they are needed.

    Each thread that computes has OpenMP threads of its own. If a process has more of them than cores, GNU's OpenMP lets
    all of them sleep between two parallel regions instead of spinning. The engine's thread runs a hundred regions per
    step, so every other thread calls this function after it has computed. Without it, the threads that had loaded a
    model of 0.2B parameters made 16 completions of 64 tokens on two cores take 1.12 times as long.

    Returns:
        Whether the threads have ended. Only the OpenMP in PyTorch's wheels for Linux is supported.
    """
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = sorted(path for folder in folders for path in (Path(folder) / "lib").glob("libgomp*"))
    try:
        pause = ctypes.CDLL(str(libraries[0])).omp_pause_resource_all
    except (IndexError, OSError, AttributeError):
        _log.debug("PyTorch has no OpenMP whose threads can be ended")
        return False
    return bool(pause(_PAUSE_HARD) == 0)
