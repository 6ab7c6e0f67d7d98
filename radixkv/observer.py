"""Who wants to know what the engine does: metrics and traces."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.errors import RadixKVError
from radixkv.request import Outcome, Request


class Observer:
    """Is told of what happens, on the engine's thread. Does nothing; subclasses do what they want to, quickly.

    What it raises ends the engine.
    """

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
    """Tells several observers, in the order in which they are given."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def request_refused(self, error: RadixKVError) -> None:
        """A request was refused."""
        for observer in self._observers:
            observer.request_refused(error)

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed."""
        for observer in self._observers:
            observer.step_done(seconds, num_requests, num_prefill_tokens, num_decode_tokens)

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised."""
        for observer in self._observers:
            observer.step_failed(seconds, num_requests)

    def request_paused(self, request: Request) -> None:
        """A running request gave its blocks back."""
        for observer in self._observers:
            observer.request_paused(request)

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request is over."""
        for observer in self._observers:
            observer.request_ended(request, outcome, error, now_s)
