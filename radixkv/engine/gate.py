"""Accepts requests while there is room, and knows the unfinished ones."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from radixkv.config import EngineConfig
from radixkv.errors import Draining, QueueFull, RadixKVError
from radixkv.scheduling.rates import Rates
from radixkv.scheduling.request import Request

# Bounds and default of the hint after how many seconds to try a full queue again.
_MIN_RETRY_S, _DEFAULT_RETRY_S, _MAX_RETRY_S = 0.05, 1.0, 60.0
_NUM_REMEMBERED_ENDS = 64


class Gate:
    """Bounds the number of unfinished requests. All methods may be called from any thread.

        enter ─▶ unfinished ─▶ leave        closed: nobody enters

    Args:
        config: how many requests may be unfinished, in all and of one tenant.
        rates: how fast tenants may call and have tokens computed; None for any rate.
    """

    def __init__(self, config: EngineConfig, rates: Rates | None = None) -> None:
        self._rates = rates
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

    def enter(self, request: Request, pass_on: Callable[[], None]) -> None:
        """Accept a request and call `pass_on`, so that no request that was accepted comes after `close`.

        Raises:
            Draining: the gate is closed.
            QueueFull: too many requests are unfinished, or too many of this tenant.
            RateExceeded: this tenant is above its rates.
        """
        tenant = request.tenant
        with self._changed:
            if self._is_closed:
                raise Draining("engine: shutting down, no new requests")
            self._require_room(len(self._unfinished), self._max_unfinished, "")
            self._require_room(self._num_by_tenant[tenant], self._max_tenant_requests, " of this tenant")
            if self._rates is not None:
                self._rates.enter(tenant)
            self._unfinished.add(request.future)
            self._num_by_tenant[tenant] += 1
            pass_on()

    def note_start(self, request: Request) -> None:
        """Charge the tenant of a request that got its blocks for the tokens that are not cached."""
        if self._rates is not None:
            self._rates.charge(request.tenant, request.num_left)

    def leave(self, request: Request) -> None:
        """Forget a request that is over, and charge its tenant for the tokens that it generated."""
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

    def wait_until_answered(self, timeout_s: float) -> bool:
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
        """Cancel all unfinished requests, and raise `error` for those that can't be cancelled any more."""
        self.cancel_all()
        with self._changed:
            unfinished = list(self._unfinished)
        for future in unfinished:
            if not future.done():
                future.set_exception(error)

    def _require_room(self, num_unfinished: int, max_unfinished: int, whose: str) -> None:
        if num_unfinished >= max_unfinished:
            raise QueueFull(
                f"engine: expected fewer than {max_unfinished} unfinished requests{whose}, got {num_unfinished}",
                retry_after_s=self._seconds_to_end(num_unfinished // 2),
            )

    def _seconds_to_end(self, num_requests: int) -> float:
        """Estimate how long it takes until `num_requests` have ended, from the pace of the last ones."""
        if len(self._ended_s) < 2:
            return _DEFAULT_RETRY_S
        seconds_each = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_requests * seconds_each))
