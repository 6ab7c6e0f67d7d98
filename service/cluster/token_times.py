"""The speed of each replica, as its answers tell."""

from __future__ import annotations

from radixkv.routing.candidate import DEFAULT_TIMES, TokenTimes

_WEIGHT = 0.1
_LEAST_TOKENS = 64  # of few tokens most of the time is not theirs


class MeasuredTimes:
    """Averages the seconds that replicas take to compute a token. The last ten answers count most."""

    def __init__(self) -> None:
        self._known: dict[str, TokenTimes] = {}
        self._others = DEFAULT_TIMES

    def of(self, name: str) -> TokenTimes:
        """Return the times of a replica; those of the mean of the others before it has told any. Complexity: O(1)."""
        return self._known.get(name, self._others)

    def note(self, name: str, computed_tokens: int, seconds: float) -> None:
        """Note an answer. One that computed little tells nothing."""
        if computed_tokens < _LEAST_TOKENS or seconds <= 0:
            return
        measured_s = seconds / computed_tokens
        before = self._known.get(name)
        known_s = measured_s if before is None else before.compute_s + _WEIGHT * (measured_s - before.compute_s)
        self._known[name] = TokenTimes(compute_s=known_s)
        self._average()

    def forget(self, name: str) -> None:
        """Forget a replica."""
        self._known.pop(name, None)
        self._average()

    def _average(self) -> None:
        known = [each.compute_s for each in self._known.values()]
        self._others = TokenTimes(compute_s=sum(known) / len(known)) if known else DEFAULT_TIMES
