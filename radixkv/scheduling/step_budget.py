"""The token budget of the next step."""

from __future__ import annotations

# Number of steps that must fit before the budget is doubled.
_STEPS_TO_DOUBLE = 64


class StepBudget:
    """The maximum number of tokens per step: halved when the device runs out of memory, then slowly doubled again.

        512 ── did not fit ──▶ 256 ── did not fit ──▶ 128 ── 64 steps fitted ──▶ 256 ── 64 steps fitted ──▶ 512

    Args:
        max_tokens: the budget while all steps fit.

    Attributes:
        num_tokens: the current budget, at least 1.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = max_tokens
        self._max_tokens = max_tokens
        self._num_fitted = 0

    def shrink(self, num_tokens: int) -> bool:
        """Record that a step of `num_tokens` did not fit. Returns whether a smaller step can be tried."""
        self.num_tokens = max(1, num_tokens // 2)
        self._num_fitted = 0
        return num_tokens > 1

    def grow(self) -> None:
        """Record that a step fitted."""
        if self.num_tokens == self._max_tokens:
            return
        self._num_fitted += 1
        if self._num_fitted == _STEPS_TO_DOUBLE:
            self.num_tokens = min(self._max_tokens, 2 * self.num_tokens)
            self._num_fitted = 0
