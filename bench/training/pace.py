"""The progress of a training run, by time or by steps, and its learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP_SHARE = 0.03  # share of the budget
_LAST_RATE_SHARE = 0.02  # the last learning rate, as a share of the highest one


@dataclass(frozen=True, slots=True)
class Pace:
    """A budget of training time or of steps. Runs with the same budget of steps have the same learning rates.

    Attributes:
        seconds: seconds spent in training steps; None for a budget of steps.
        steps: number of steps; None for a budget of time.
    """

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("pace: expected either seconds or steps, got both or neither")

    def share(self, seconds: float, steps: int) -> float:
        """Return the share of the budget that was used; at 1 the run ends."""
        return seconds / self.seconds if self.seconds is not None else steps / (self.steps or 1)


def learning_rate(share: float, highest: float) -> float:
    """Return the learning rate at a share of the budget: linear warm-up, then a cosine decay to a fiftieth."""
    if share < _WARM_UP_SHARE:
        return highest * share / _WARM_UP_SHARE
    decay_progress = (min(share, 1.0) - _WARM_UP_SHARE) / (1 - _WARM_UP_SHARE)
    return highest * (_LAST_RATE_SHARE + (1 - _LAST_RATE_SHARE) * (1 + math.cos(math.pi * decay_progress)) / 2)
