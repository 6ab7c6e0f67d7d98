"""Gives running requests the blocks for their next tokens, and pauses requests when there are none."""

from __future__ import annotations

from radixkv.engine.observer import Observer
from radixkv.engine.tally import Tally
from radixkv.errors import CapacityError, OutOfBlocks
from radixkv.scheduling.lending import Lending
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight


class Growth:
    """Makes room for running requests before each step.

    Args:
        scheduler: knows the running requests.
        flights: knows who follows whom.
        lending: gives prompts back what they have lent.
        tally, observer: are told of each pause.
    """

    def __init__(
        self, scheduler: Scheduler, flights: SingleFlight, lending: Lending, tally: Tally, observer: Observer
    ) -> None:
        self._scheduler = scheduler
        self._flights = flights
        self._lending = lending
        self._tally = tally
        self._observer = observer

    def extend_leases(self) -> None:
        """Give each running generation the block for its next token, and each prompt what it has lent and is free.

        If there are no blocks for what the next step computes, pause the youngest request.

        The oldest request can pause all others. If it runs alone and there is still no block, it is paused itself,
        which unpins the blocks that it does not need. It is admitted again with a block, or it is refused because only
        held leases and other tenants' floors are in its way. So it gains at least one token each time.
        """
        self._lending.begin_step()
        for request in sorted(self._scheduler.running, key=lambda running: running.arrival):
            while request.lease is not None:
                try:
                    self._lending.take_back(request)
                    extend_lease(request)
                    break
                except CapacityError as error:
                    self._make_room_for(request, error)

    def free_slot(self) -> None:
        """Pause a request of the tenant with the most running ones, if another tenant waits and has none running."""
        if (youngest := self._scheduler.slot_to_free()) is not None:
            self._pause(youngest)

    def _make_room_for(self, request: Request, error: CapacityError) -> None:
        """Pause the youngest of the requests that hold the blocks in question; it may be `request` itself.

        A compressed generation is never paused. It needs no more blocks, so it ends, and gives back what it has.
        """
        self._pause(
            max(
                (
                    running
                    for running in self._scheduler.running
                    if running.compression is None
                    and (isinstance(error, OutOfBlocks) or running.tenant == request.tenant)
                ),
                key=lambda holder: holder.arrival,
            )
        )

    def _pause(self, request: Request) -> None:
        """Take a running request's blocks. What it published stays cached, and it goes on from there later."""
        self._scheduler.resume(self._flights.leave(request))
        request.close_state()
        request.open_lease.close()
        request.lease = None
        self._scheduler.pause(request)
        self._tally.paused()
        self._observer.request_paused(request)


def extend_lease(request: Request) -> None:
    """Add what a running request generated to its lease, and take the blocks for it.

    Raises:
        OutOfBlocks, QuotaExceeded: there are none. The lease is as before.
    """
    lease = request.open_lease
    if lease.num_tokens < request.num_tokens:
        lease.extend(request.tokens_from(lease.num_tokens))
