"""Rates that tenants may not exceed: calls and computed tokens a second."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from radixkv.config import TenantConfig
from radixkv.errors import RateExceeded


class TokenBucket:
    """A store that fills at a steady rate, up to what it may save. It may be drawn below zero.

    Args:
        per_s: what comes in a second.
        burst_s: seconds of it that are saved at most; at least one unit is.
        now_s: the time, at which it is full.
    """

    def __init__(self, per_s: float, burst_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * burst_s)
        self._level = self._most
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Draw an amount, whatever is there."""
        self._fill(now_s)
        self._level -= amount

    def seconds_until(self, amount: float, now_s: float) -> float:
        """Return the seconds until an amount is there; 0 if it is."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) / self._per_s)

    def is_full(self, now_s: float) -> bool:
        """Whether it is as a new one."""
        self._fill(now_s)
        return self._level >= self._most

    def _fill(self, now_s: float) -> None:
        self._level = min(self._most, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class Rates:
    """Refuses calls of tenants that are above their rates. All methods may be called from any thread.

        enter ─▶ one call taken ─▶ charge, once admitted: the tokens that are not cached ─▶ charge: generated tokens

    What a call computes is known only once it is admitted. So a tenant may go below zero, by the calls that entered
    before; while it is there, it is refused.

    Args:
        tenants: the rates of tenants with a section of their own.
        default: the rates of each other tenant.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        default: TenantConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = tenants
        self._default = default
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[TokenBucket | None, TokenBucket | None]] = OrderedDict()

    @property
    def num_known(self) -> int:
        """Tenants whose buckets are kept: those that used any of their rates lately."""
        return len(self._buckets)

    def enter(self, tenant: str) -> None:
        """Take one call of a tenant.

        Raises:
            RateExceeded: it has none left, or computes too much; `retry_after_s` is when it will not.
        """
        with self._lock:
            now_s = self._clock()
            calls, tokens = self._of(tenant, now_s)
            call_in_s = 0.0 if calls is None else calls.seconds_until(1, now_s)
            tokens_in_s = 0.0 if tokens is None else tokens.seconds_until(0, now_s)
            if call_in_s or tokens_in_s:
                what = "calls" if call_in_s >= tokens_in_s else "computed tokens"
                raise RateExceeded(
                    f"tenant: expected at most its rate of {what} a second, got more",
                    retry_after_s=max(call_in_s, tokens_in_s),
                )
            if calls is not None:
                calls.take(1, now_s)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for tokens that are computed for it."""
        with self._lock:
            now_s = self._clock()
            _, tokens = self._of(tenant, now_s)
            if tokens is not None:
                tokens.take(num_tokens, now_s)

    def _of(self, tenant: str, now_s: float) -> tuple[TokenBucket | None, TokenBucket | None]:
        """Return the buckets of calls and of tokens; None for a rate without a bound."""
        buckets = self._buckets.get(tenant)
        if buckets is not None:
            return buckets
        bounds = self._tenants.get(tenant, self._default)
        rates = bounds.max_calls_per_s, bounds.max_computed_tokens_per_s
        calls, tokens = (None if rate is None else TokenBucket(rate, bounds.rate_burst_s, now_s) for rate in rates)
        if calls is not None or tokens is not None:
            self._forget_full(now_s)
            self._buckets[tenant] = calls, tokens
        return calls, tokens

    def _forget_full(self, now_s: float) -> None:
        """Forget up to two tenants whose buckets are full, which a new one would be too."""
        for tenant in list(itertools.islice(self._buckets, 2)):
            if all(bucket is None or bucket.is_full(now_s) for bucket in self._buckets[tenant]):
                del self._buckets[tenant]
            else:
                self._buckets.move_to_end(tenant)
