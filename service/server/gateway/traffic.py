"""Counts the tokens of the gateway's requests, for the loads that it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.api.result import Usage

_PERIOD_S = 1.0


class Traffic:
    """Tokens that came and went through the gateway. To be used on the event loop alone.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._rate = 0.0
        self._rate_s = clock()
        self._rate_tokens = 0

    def generated(self, num_tokens: int) -> None:
        """Count new tokens."""
        self._generated_tokens += num_tokens

    def answered(self, usage: Usage) -> None:
        """Count the prompt of an answer."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens, 0 without any."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def tokens_per_s(self) -> float:
        """Generated tokens a second since the last call that measured it, at least a second ago."""
        now_s = self._clock()
        if now_s - self._rate_s >= _PERIOD_S:
            self._rate = (self._generated_tokens - self._rate_tokens) / (now_s - self._rate_s)
            self._rate_s, self._rate_tokens = now_s, self._generated_tokens
        return self._rate
