"""Ends requests: every way out of the engine leads through here."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.engine.early_ends import EarlyEnds
from radixkv.engine.observer import Observer
from radixkv.engine.tally import Tally
from radixkv.errors import RadixKVError
from radixkv.scheduling.request import Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight


class Endings:
    """Takes requests out of the engine and gives their blocks back.

    Args:
        scheduler, flights, early_ends: forget the request.
        tally, observer: are told how it ended.
        on_end: called last, with the request.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        flights: SingleFlight,
        early_ends: EarlyEnds,
        tally: Tally,
        observer: Observer,
        on_end: Callable[[Request], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._flights = flights
        self._early_ends = early_ends
        self._tally = tally
        self._observer = observer
        self._on_end = on_end
        self._clock = clock

    def fail(self, request: Request, error: RadixKVError) -> None:
        """End a request and raise `error` for its caller."""
        self.end(request, Outcome.FAILED, error)
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def end(self, request: Request, outcome: Outcome, error: RadixKVError | None = None) -> None:
        """End a request, close its lease and let its followers go on. Its future is left alone."""
        request.is_over = True
        self._scheduler.remove(request)
        self._scheduler.resume(self._flights.leave(request))
        self._tally.ended(request, outcome)
        self._early_ends.forget(request)
        request.close_state()
        if request.lease is not None:
            request.lease.close()
            request.lease = None
        self._observer.request_ended(request, outcome, error, self._clock())
        self._on_end(request)
