"""Admission control: bounds the number of unfinished requests, and keeps track of them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from radixkv.config import EngineConfig
from radixkv.errors import Draining, QueueFull, RadixKVError
from radixkv.scheduling.rate_limiter import RateLimiter
from radixkv.scheduling.request import Request

# Bounds and default of the time after which a caller should retry when the queue is full.
_MIN_RETRY_S = 0.05
_DEFAULT_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_NUM_REMEMBERED_ENDS = 64


class AdmissionControl:
    """Bounds the number of unfinished requests. All methods may be called from any thread.

        enter ─▶ unfinished ─▶ leave        closed: no request enters

    Args:
        config: how many requests may be unfinished, in total and per tenant.
        rates: limits the rates of calls, and of computed and generated tokens, per tenant; None for no limits.
    """

    def __init__(self, config: EngineConfig, rates: RateLimiter | None = None) -> None:
        self._rates = rates if rates is not None and rates.is_on else None
        self._max_unfinished = config.max_waiting_requests + config.max_running_requests
        self._max_tenant_requests = config.max_tenant_requests
        self._is_closed = False
        self._unfinished: set[Future[Any]] = set()
        self._num_by_tenant: Counter[str] = Counter()
        self._ended_s: deque[float] = deque(maxlen=_NUM_REMEMBERED_ENDS)
        self._changed = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are accepted."""
        return self._is_closed

    def enter(self, request: Request, submit: Callable[[Request], None]) -> None:
        """Accept a request and call `submit` with it. After `close` no call of `submit` starts.

        Raises:
            Draining: the engine accepts no more requests.
            QueueFull: too many requests are unfinished, in total or of this tenant.
            RateExceeded: this tenant exceeds its rates.
        """
        tenant = request.tenant
        with self._changed:
            if self._is_closed:
                raise Draining("engine: shutting down, no new requests")
            num_unfinished = len(self._unfinished)
            if num_unfinished >= self._max_unfinished:
                raise self._queue_full(num_unfinished, self._max_unfinished, "")
            num_unfinished = self._num_by_tenant[tenant]
            if num_unfinished >= self._max_tenant_requests:
                raise self._queue_full(num_unfinished, self._max_tenant_requests, " of this tenant")
            if self._rates is not None:
                self._rates.enter(tenant)
            self._unfinished.add(request.future)
            self._num_by_tenant[tenant] += 1
            submit(request)

    def charge_call(self, tenant: str) -> None:
        """Charge a tenant for a call that is not a request.

        Raises:
            RateExceeded: this tenant exceeds its rates.
        """
        if self._rates is not None:
            self._rates.enter(tenant)

    def charge_prompt(self, request: Request) -> None:
        """Charge the tenant of an admitted request for the prompt tokens that the request has to compute.

        What is computed again after a preemption is not charged.
        """
        if self._rates is not None:
            self._rates.charge(request.tenant, request.num_left)

    def leave(self, request: Request) -> None:
        """Forget a request that has ended, and charge its tenant for the tokens that it generated."""
        tenant = request.tenant
        if self._rates is not None and request.generation is not None:
            self._rates.charge(tenant, len(request.generation.token_ids))
        with self._changed:
            self._unfinished.discard(request.future)
            self._num_by_tenant[tenant] -= 1
            if not self._num_by_tenant[tenant]:
                del self._num_by_tenant[tenant]
            self._ended_s.append(time.monotonic())
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more requests."""
        with self._changed:
            self._is_closed = True

    def wait_until_done(self, timeout_s: float) -> bool:
        """Wait until every request is answered or cancelled. Returns whether all were within `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: all(future.done() for future in self._unfinished), timeout_s)

    def cancel_all(self) -> None:
        """Cancel the futures of all unfinished requests."""
        with self._changed:
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()
        with self._changed:
            self._changed.notify_all()

    def abandon(self, error: RadixKVError) -> None:
        """Cancel all unfinished requests, and fail those that can no longer be cancelled with `error`."""
        self.cancel_all()
        with self._changed:
            unfinished = list(self._unfinished)
        for future in unfinished:
            if not future.done():
                future.set_exception(error)

    def _queue_full(self, num_unfinished: int, max_unfinished: int, scope_suffix: str) -> QueueFull:
        return QueueFull(
            f"engine: expected fewer than {max_unfinished} unfinished requests{scope_suffix}, got {num_unfinished}",
            retry_after_s=self._seconds_to_end(num_unfinished // 2),
        )

    def _seconds_to_end(self, num_requests: int) -> float:
        """Estimate the time until `num_requests` have ended, from the rate at which the last ones ended."""
        if len(self._ended_s) < 2:
            return _DEFAULT_RETRY_S
        seconds_each = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_requests * seconds_each))
