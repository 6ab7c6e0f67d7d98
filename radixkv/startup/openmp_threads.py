"""Threads with which PyTorch computes on a CPU."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

_PAUSE_HARD = 2  # omp_pause_hard of omp.h

_log = logging.getLogger(__name__)


def end_own_threads() -> bool:
    """End the threads of OpenMP that the calling thread computed with. They start again when it needs them.

    Each thread that computes has threads of its own. Once there are more in the process than cores, GNU's OpenMP lets
    all of them sleep between two calls, where they would wait awake for a few milliseconds. The engine's thread makes
    a hundred calls a step, so whoever computes on another thread calls this when it is done: with the threads left that
    had loaded a model of 0.2B, 16 answers of 64 tokens on two cores took 1.12 times as long.

    Returns:
        Whether they are ended. Another OpenMP than the one of PyTorch's wheels for Linux is left alone.
    """
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        pause = ctypes.CDLL(str(libraries[0])).omp_pause_resource_all
    except (IndexError, OSError, AttributeError):
        _log.debug("PyTorch has no OpenMP whose threads can be ended")
        return False
    return bool(pause(_PAUSE_HARD) == 0)
