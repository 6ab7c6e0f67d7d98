"""Who wants to know what the engine does: metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from radixkv.errors import RadixKVError
from radixkv.scheduling.request import Outcome, Request

_log = logging.getLogger(__name__)


class Observer:
    """Is told of what happens, on the engine's thread. Does nothing; subclasses do what they want to, quickly."""

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused at once and never queued. Told on the caller's thread, maybe on several at a time."""

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed. Prefill tokens are all but those of requests that decode."""

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised."""

    def request_paused(self, request: Request) -> None:
        """A running request gave its blocks back, and waits for others."""

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request is over.

        Args:
            request: with its usage and its times.
            outcome: how it ended.
            error: why it failed, if it did.
            now_s: by the engine's clock, which `request.received_s` and the others are of.
        """


class Observers(Observer):
    """Tells several observers, in the order in which they are given. What one of them raises is logged."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused."""
        self._tell(lambda observer: observer.request_refused(error))

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed."""
        self._tell(lambda observer: observer.step_done(seconds, num_requests, num_prefill_tokens, num_decode_tokens))

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised."""
        self._tell(lambda observer: observer.step_failed(seconds, num_requests))

    def request_paused(self, request: Request) -> None:
        """A running request gave its blocks back."""
        self._tell(lambda observer: observer.request_paused(request))

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request is over."""
        self._tell(lambda observer: observer.request_ended(request, outcome, error, now_s))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:  # noqa: BLE001 - who looks on must not end what goes on
                _log.exception("an observer failed")
