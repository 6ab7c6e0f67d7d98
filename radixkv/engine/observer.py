"""The events that the engine reports to metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from radixkv.errors import RadixKVError
from radixkv.scheduling.request import Outcome, Request

_log = logging.getLogger(__name__)


class Observer:
    """Receives events and ignores them, all but `request_refused` on the engine's thread.

    Overriding methods must return quickly.
    """

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused before it was queued. Called on the threads of callers, possibly concurrently."""

    def request_admitted(self, request: Request) -> None:
        """A request got its blocks for the first time; not reported again when it resumes after a preemption."""

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed. All tokens except those of decoding requests count as prefill tokens."""

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised an exception."""

    def request_preempted(self, request: Request) -> None:
        """A running request was preempted: it released its blocks and waits to be admitted again."""

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request ended.

        Args:
            request: the request, with its usage and its times.
            outcome: how it ended.
            error: why it failed; None if it did not fail.
            now_s: when it ended, on the clock of `request.times.received_s`.
        """


class CompositeObserver(Observer):
    """Notifies several observers of each event, in order. Logs the exceptions that they raise."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused."""
        self._notify(lambda observer: observer.request_refused(error))

    def request_admitted(self, request: Request) -> None:
        """A request got its blocks."""
        self._notify(lambda observer: observer.request_admitted(request))

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed."""
        self._notify(lambda observer: observer.step_done(seconds, num_requests, num_prefill_tokens, num_decode_tokens))

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised an exception."""
        self._notify(lambda observer: observer.step_failed(seconds, num_requests))

    def request_preempted(self, request: Request) -> None:
        """A running request was preempted."""
        self._notify(lambda observer: observer.request_preempted(request))

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request ended."""
        self._notify(lambda observer: observer.request_ended(request, outcome, error, now_s))

    def _notify(self, notify: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                notify(observer)
            except Exception:  # noqa: BLE001 - an observer must not stop the engine
                _log.exception("an observer raised an exception")
