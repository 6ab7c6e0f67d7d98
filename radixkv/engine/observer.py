"""The events that the engine reports to metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from radixkv.errors import RadixKVError
from radixkv.scheduling.request import Outcome, Request

_log = logging.getLogger(__name__)


class Observer:
    """Receives events on the engine's thread and ignores them. Subclasses override methods, which must be quick."""

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused at once and never queued. Called on callers' threads, maybe on several at a time."""

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed. All tokens but those of decoding requests are prefill tokens."""

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised."""

    def request_paused(self, request: Request) -> None:
        """A running request gave its blocks back and waits for others."""

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request is over.

        Args:
            request: has its usage and its times.
            outcome: how it ended.
            error: why it failed; None if it did not.
            now_s: time of the end, on the clock of `request.received_s`.
        """


class Observers(Observer):
    """Passes events on to several observers, in their order. Logs what one of them raises."""

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
            except Exception:  # noqa: BLE001 - an observer must not stop the engine
                _log.exception("an observer failed")
