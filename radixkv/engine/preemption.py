"""Preemption: allocates blocks for the next tokens of running requests, and preempts requests if there are too few."""

from __future__ import annotations

from radixkv.engine.observer import Observer
from radixkv.engine.stats_collector import StatsCollector
from radixkv.errors import CapacityError, OutOfBlocks
from radixkv.scheduling.lending import Lending
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight


class Preemptor:
    """Allocates blocks for the next tokens of running requests, and preempts running requests.

    A preempted request releases its blocks. Its published tokens stay cached until they are evicted, and the request
    resumes from them later, in exact mode with the same result.

    Args:
        scheduler: holds the running requests.
        flights: resumes the followers of a preempted request.
        lending: returns lent blocks to the prompts that lent them.
        stats, observer: are notified of each preemption.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        flights: SingleFlight,
        lending: Lending,
        stats: StatsCollector,
        observer: Observer,
    ) -> None:
        self._scheduler = scheduler
        self._flights = flights
        self._lending = lending
        self._stats = stats
        self._observer = observer

    def prepare_step(self) -> None:
        """Allocate a block for each generation that needs one, and return lent blocks to prompts. Preempt if needed.

        If blocks are missing, the youngest request that `_victim` allows is preempted. The oldest request can preempt
        all of these. If no other one is left and a block is still missing, it is preempted itself, which unpins the
        blocks that it does not need. It is then admitted again with a block, or refused because held leases and other
        tenants' floors leave too few blocks. Therefore it computes at least one token each time.

        If a tenant has waiting requests and no running one while `max_running_requests` requests run, the youngest
        request of the tenant with the most running requests is preempted for it. Compressed generations are excepted.
        """
        self._lending.begin_step()
        if not self._scheduler.running:
            return
        for request in sorted(self._scheduler.running, key=lambda running: running.arrival):
            while request.lease is not None:
                try:
                    self._lending.reclaim(request)
                    request.extend_lease()
                    break
                except CapacityError as error:
                    self.preempt(self._victim(request, error))
        youngest = self._scheduler.request_to_preempt()
        if youngest is not None:
            self.preempt(youngest)

    def preempt(self, request: Request) -> None:
        """Release the blocks of a running request, and put the request back into the queue at its old position."""
        self._scheduler.resume(self._flights.leave(request))
        request.release()
        self._scheduler.preempt(request)
        self._stats.count_preemption()
        self._observer.request_preempted(request)

    def _victim(self, request: Request, error: CapacityError) -> Request:
        """Choose the youngest of the requests that hold the missing blocks. It may be `request` itself.

        If its tenant's ceiling is reached, only requests of the tenant are candidates. A compressed generation is never
        preempted. It needs no more blocks, so it always reaches its end.
        """
        return max(
            (
                running
                for running in self._scheduler.running
                if running.compression is None and (isinstance(error, OutOfBlocks) or running.tenant == request.tenant)
            ),
            key=lambda holder: holder.arrival,
        )
