"""Counts the tokens of the gateway's requests, for the load records that it receives."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.api.result import Usage

_PERIOD_S = 1.0


class TokenCounter:
    """Counts the tokens of the gateway's requests. For use on one event loop.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        # The last measurement: its result, when it was made, and how many tokens had been generated then.
        self._tokens_per_s = 0.0
        self._measured_at_s = clock()
        self._measured_tokens = 0

    def add_generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._generated_tokens += num_tokens

    def add_prompt(self, usage: Usage) -> None:
        """Count the prompt of a completion."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Fraction of prompt tokens that were cached; 0 without any."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def tokens_per_s(self) -> float:
        """Return the generated tokens per second, measured over periods of at least one second."""
        now_s = self._clock()
        if now_s - self._measured_at_s >= _PERIOD_S:
            self._tokens_per_s = (self._generated_tokens - self._measured_tokens) / (now_s - self._measured_at_s)
            self._measured_at_s = now_s
            self._measured_tokens = self._generated_tokens
        return self._tokens_per_s
