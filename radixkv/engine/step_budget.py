"""How many tokens the next step may have."""

from __future__ import annotations

# So many steps have to fit until larger ones are tried again.
_STEPS_TO_DOUBLE = 64


class StepBudget:
    """The most tokens of a step: fewer once the device had no memory for one, and more again by and by.

        512 ── did not fit ──▶ 256 ── did not fit ──▶ 128 ── 64 steps fitted ──▶ 256 ── 64 steps fitted ──▶ 512

    Args:
        most_tokens: what it is as long as all steps fit.

    Attributes:
        num_tokens: what it is now, at least 1.
    """

    def __init__(self, most_tokens: int) -> None:
        self.num_tokens = most_tokens
        self._most_tokens = most_tokens
        self._num_fitted = 0

    def shrink(self, num_tokens: int) -> bool:
        """Note that a step of so many tokens did not fit. Returns whether a smaller one can be tried."""
        self.num_tokens = max(1, num_tokens // 2)
        self._num_fitted = 0
        return num_tokens > 1

    def grow(self) -> None:
        """Note that a step fitted."""
        if self.num_tokens == self._most_tokens:
            return
        self._num_fitted += 1
        if self._num_fitted == _STEPS_TO_DOUBLE:
            self.num_tokens = min(self._most_tokens, 2 * self.num_tokens)
            self._num_fitted = 0
