"""The speed of each replica, as its answers tell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.routing.candidate import DEFAULT_TIMES, TokenTimes

_KEPT = 0.9  # of what is known, at each answer: the last ten count most
_LEAST_TOKENS = 64  # of few tokens most of the time is not theirs
_ALIKE = 2.0
_MEMORY_S = 30.0


@dataclass(slots=True)
class _Speed:
    """Tokens that a replica computed, older ones counting less, and the seconds that it was busy with them."""

    tokens: float = 0.0
    busy_s: float = 0.0
    told_s: float = 0.0  # time of its last answer

    @property
    def compute_s(self) -> float:
        return self.busy_s / self.tokens


class MeasuredTimes:
    """Measures the seconds that replicas take to compute a token.

    A replica computes several prompts at a time, so how long one of them takes tells how many there were. What counts
    is the time between two answers, or from the question on if that came later:

        asked    a     b
                 ├─────┼─────────┤ a answered: it took all of this
                       └─────────┼───┤ b answered: it took this
                                     idle

    What is measured on a busy machine varies. Replicas of less than twice the fastest one's time count as equal, with
    the mean of all such: a prompt that went where it seems to be computed a little faster would wait in a queue for
    much longer than it gains. One that is slower has its own time. Where it gets no prompts any more, that is forgotten
    within a minute or so, and it is tried again.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speeds: dict[str, _Speed] = {}
        self._fastest_s = 0.0
        self._equals = DEFAULT_TIMES

    def of(self, name: str) -> TokenTimes:
        """Return the times of a replica. Complexity: O(1)."""
        speed = self._speeds.get(name)
        if speed is None or not speed.tokens or speed.compute_s < _ALIKE * self._fastest_s:
            return self._equals
        kept = math.exp((speed.told_s - self._clock()) / _MEMORY_S)
        compute_s = self._fastest_s + kept * (speed.compute_s - self._fastest_s)
        return self._equals if compute_s < _ALIKE * self._fastest_s else TokenTimes(compute_s=compute_s)

    def note(self, name: str, asked_s: float, computed_tokens: int | None) -> None:
        """Note an answer that has just come. One that computed little tells nothing, nor does a failure.

        Args:
            name: of the replica.
            asked_s: when it was asked, by the clock.
            computed_tokens: of the prompt; None if the call failed.

        Complexity: O(replicas).
        """
        speed, now_s = self._speeds.setdefault(name, _Speed()), self._clock()
        busy_s, speed.told_s = now_s - max(asked_s, speed.told_s), now_s
        if computed_tokens is not None and computed_tokens >= _LEAST_TOKENS and busy_s > 0:
            speed.tokens = _KEPT * speed.tokens + computed_tokens
            speed.busy_s = _KEPT * speed.busy_s + busy_s
            self._compare()

    def forget(self, name: str) -> None:
        """Forget a replica."""
        self._speeds.pop(name, None)
        self._compare()

    def _compare(self) -> None:
        known = [speed.compute_s for speed in self._speeds.values() if speed.tokens]
        self._fastest_s = min(known, default=0.0)
        alike = [compute_s for compute_s in known if compute_s < _ALIKE * self._fastest_s]
        self._equals = TokenTimes(compute_s=sum(alike) / len(alike)) if alike else DEFAULT_TIMES
