"""The measured speed of each replica."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.routing.candidate import DEFAULT_TIMES, TokenTimes

_DECAY = 0.9  # per response, so that about the last ten count
_MIN_TOKENS = 64  # the time of shorter prompts is mostly overhead
_EQUAL_FACTOR = 2.0  # replicas count as equally fast if they take less than this multiple of the shortest time
_MEMORY_S = 30.0  # without responses, a longer time approaches the shortest one with this time constant


@dataclass(slots=True)
class _Speed:
    """Tokens that a replica computed, with decaying weights, and the seconds that it was busy with them."""

    tokens: float = 0.0
    busy_s: float = 0.0
    last_response_s: float = 0.0  # time of its last response

    @property
    def compute_s(self) -> float:
        """Seconds per token."""
        return self.busy_s / self.tokens


class ReplicaSpeeds:
    """Measures the compute time per token of each replica.

    A replica computes several prompts concurrently, so the latency of one depends on their number. Therefore the time
    between two responses is measured, or the time since the request if that was sent later:

        sent     a     b
                 ├─────┼─────────┤ the response to a: all of this time counts
                       └─────────┼───┤ the response to b: only the time since the response to a counts
                                     idle

    Measurements on a busy machine vary. Replicas that take less than twice the time of the fastest one count as equally
    fast, with the mean of their times: a prompt that is sent to a slightly faster replica would lose more time in its
    queue than it gains. A slower replica has its own time. If it gets no prompts, its time approaches that of the
    fastest replica within about a minute, so that it is tried again.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speeds: dict[str, _Speed] = {}
        self._fastest_s = 0.0  # seconds per token of the fastest replica
        self._times_of_equals = DEFAULT_TIMES  # of the replicas that count as equally fast

    def of(self, name: str) -> TokenTimes:
        """Return the times per token of a replica. Complexity: O(1)."""
        speed = self._speeds.get(name)
        if speed is None or not speed.tokens or speed.compute_s < _EQUAL_FACTOR * self._fastest_s:
            return self._times_of_equals
        remaining_share = math.exp((speed.last_response_s - self._clock()) / _MEMORY_S)
        compute_s = self._fastest_s + remaining_share * (speed.compute_s - self._fastest_s)
        return self._times_of_equals if compute_s < _EQUAL_FACTOR * self._fastest_s else TokenTimes(compute_s=compute_s)

    def note(self, name: str, sent_s: float, computed_tokens: int | None) -> None:
        """Record a response that has just arrived. Failures and short prompts are not measured.

        Args:
            name: name of the replica.
            sent_s: time of the request, by the clock.
            computed_tokens: number of prompt tokens that were computed; None if the call failed.

        Complexity: O(replicas).
        """
        speed = self._speeds.setdefault(name, _Speed())
        now_s = self._clock()
        busy_s = now_s - max(sent_s, speed.last_response_s)
        speed.last_response_s = now_s
        if computed_tokens is not None and computed_tokens >= _MIN_TOKENS and busy_s > 0:
            speed.tokens = _DECAY * speed.tokens + computed_tokens
            speed.busy_s = _DECAY * speed.busy_s + busy_s
            self._update_equals()

    def forget(self, name: str) -> None:
        """Remove a replica."""
        self._speeds.pop(name, None)
        self._update_equals()

    def _update_equals(self) -> None:
        """Find the fastest replica and those that count as equally fast."""
        measured = [speed.compute_s for speed in self._speeds.values() if speed.tokens]
        self._fastest_s = min(measured, default=0.0)
        equals = [compute_s for compute_s in measured if compute_s < _EQUAL_FACTOR * self._fastest_s]
        self._times_of_equals = TokenTimes(compute_s=sum(equals) / len(equals)) if equals else DEFAULT_TIMES
