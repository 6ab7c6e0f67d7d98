"""The progress of a training run, by time or by steps, and its learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP = 0.03  # of the run
_LAST = 0.02  # of the highest rate


@dataclass(frozen=True, slots=True)
class Pace:
    """A budget of computing time or of steps. A run by steps has the same rates each time.

    Attributes:
        seconds: of training, whatever happened between; None for a run by steps.
        steps: of training; None for a run by time.
    """

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("pace: expected either seconds or steps, got both or neither")

    def share(self, seconds: float, steps: int) -> float:
        """Return the share of the budget that is used; 1 or more ends the run."""
        return seconds / self.seconds if self.seconds is not None else steps / (self.steps or 1)


def learning_rate(share: float, highest: float) -> float:
    """Return the rate at a share of the budget: a line up to the highest, then half a cosine down to a fiftieth."""
    if share < _WARM_UP:
        return highest * share / _WARM_UP
    fall = (min(share, 1.0) - _WARM_UP) / (1 - _WARM_UP)
    return highest * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * fall)) / 2)
