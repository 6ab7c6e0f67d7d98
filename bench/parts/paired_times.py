"""Compares the times of the same prompts in several engines. Two of these are set up alike, and are the baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PromptTimes(NamedTuple):
    """Seconds of one prompt: time to first token, and CPU time of all threads until the engine is idle."""

    wall_s: float
    processor_s: float


def middle_ratios(
    name: str, times: Mapping[str, Sequence[PromptTimes]], baselines: tuple[str, str]
) -> npt.NDArray[np.float64]:
    """Return the mean of the middle half of the ratios of an engine's times, since other processes delay some prompts.

    Each time is divided by the geometric mean of the times of both baselines for the same prompt. The times of a
    baseline are divided by those of the first baseline, so the ratio of the second one shows the measurement error.

    Args:
        name: the engine.
        times: times of all engines, in the order of the prompts.
        baselines: the names of the two engines that are set up alike.

    Returns:
        `[2]`: the ratio of the times to first token, and that of the CPU times.
    """
    first, second = (np.array(times[each]) for each in baselines)  # [num_prompts, 2]
    divisors = first if name in baselines else np.sqrt(first * second)
    ratios = np.sort(np.array(times[name]) / divisors, axis=0)
    num_cut = len(ratios) // 4
    middle: npt.NDArray[np.float64] = ratios[num_cut : len(ratios) - num_cut].mean(axis=0)
    return middle
