"""Rate limits of tenants: calls and computed tokens per second."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from radixkv.config import TenantConfig
from radixkv.errors import RateExceeded


class TokenBucket:
    """A bucket that fills at a steady rate up to its capacity. Its level may become negative.

    Args:
        per_s: units that it gains per second.
        burst_s: seconds in which it fills; they determine its capacity, which is at least one unit.
        now_s: the current time, at which the bucket is full.
    """

    def __init__(self, per_s: float, burst_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._capacity = max(1.0, per_s * burst_s)
        self._level = self._capacity
        self._filled_at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Remove an amount, even if the bucket has less."""
        self._fill(now_s)
        self._level -= amount

    def seconds_until(self, amount: float, now_s: float) -> float:
        """Return the seconds until the bucket has an amount; 0 if it has it now."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) / self._per_s)

    def is_full(self, now_s: float) -> bool:
        """Whether it is as full as a new bucket."""
        self._fill(now_s)
        return self._level >= self._capacity

    def _fill(self, now_s: float) -> None:
        self._level = min(self._capacity, self._level + (now_s - self._filled_at_s) * self._per_s)
        self._filled_at_s = now_s


class RateLimiter:
    """Refuses calls of tenants that exceed their rates. All methods may be called from any thread.

        enter ─▶ take one call ─▶ charge at first admission: uncached tokens ─▶ charge at the end: generated tokens

    The number of tokens that a call computes is known only at its admission. So accepted calls may make a tenant's
    bucket negative; while it is negative, further calls of the tenant are refused.

    Args:
        tenants: the rates of tenants with a section of their own.
        default: the rates of each other tenant.
        clock: seconds, monotonic.

    Attributes:
        is_on: whether any tenant has a rate.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        default: TenantConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._tenants = tenants
        self.is_on = any(
            bounds.max_calls_per_s is not None or bounds.max_computed_tokens_per_s is not None
            for bounds in (default, *tenants.values())
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[TokenBucket | None, TokenBucket | None]] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose buckets are remembered."""
        return len(self._buckets)

    def enter(self, tenant: str) -> None:
        """Take one call of a tenant.

        Raises:
            RateExceeded: the tenant makes too many calls, or computes too many tokens; see `retry_after_s`.
        """
        with self._lock:
            now_s = self._clock()
            calls_bucket, tokens_bucket = self._buckets_of(tenant, now_s)
            calls_wait_s = 0.0 if calls_bucket is None else calls_bucket.seconds_until(1, now_s)
            tokens_wait_s = 0.0 if tokens_bucket is None else tokens_bucket.seconds_until(0, now_s)
            if calls_wait_s or tokens_wait_s:
                unit = "calls" if calls_wait_s >= tokens_wait_s else "computed tokens"
                raise RateExceeded(
                    f"tenant: exceeded its rate of {unit} per second", retry_after_s=max(calls_wait_s, tokens_wait_s)
                )
            if calls_bucket is not None:
                calls_bucket.take(1, now_s)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for tokens that are computed for it."""
        with self._lock:
            now_s = self._clock()
            _, tokens_bucket = self._buckets_of(tenant, now_s)
            if tokens_bucket is not None:
                tokens_bucket.take(num_tokens, now_s)

    def _buckets_of(self, tenant: str, now_s: float) -> tuple[TokenBucket | None, TokenBucket | None]:
        """Return the buckets of calls and of tokens; None for an unlimited rate."""
        buckets = self._buckets.get(tenant)
        if buckets is not None:
            return buckets
        bounds = self._tenants.get(tenant, self._default)
        calls_bucket = _full_bucket(bounds.max_calls_per_s, bounds.rate_burst_s, now_s)
        tokens_bucket = _full_bucket(bounds.max_computed_tokens_per_s, bounds.rate_burst_s, now_s)
        if calls_bucket is not None or tokens_bucket is not None:
            self._forget_full(now_s)
            self._buckets[tenant] = calls_bucket, tokens_bucket
        return calls_bucket, tokens_bucket

    def _forget_full(self, now_s: float) -> None:
        """Of the two tenants that were checked least recently, forget those whose buckets are full."""
        for tenant in list(itertools.islice(self._buckets, 2)):
            if all(bucket is None or bucket.is_full(now_s) for bucket in self._buckets[tenant]):
                del self._buckets[tenant]
            else:
                self._buckets.move_to_end(tenant)


def _full_bucket(per_s: float | None, burst_s: float, now_s: float) -> TokenBucket | None:
    return None if per_s is None else TokenBucket(per_s, burst_s, now_s)
