"""The unfinished requests of each tenant, and how much it was served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from sortedcontainers import SortedKeyList

from radixkv.scheduling.request import Request

_MAX_IDLE_TENANTS = 10_000


class TenantQueue:
    """One tenant's requests.

    Attributes:
        weight: its share beside the others'.
        serial: the order in which queues were opened.
        served: computed tokens by weight, on a scale that all tenants share.
        waiting, running: by rank; requests without and with blocks.
        following: those that wait for what a running one computes.
        num_passed_over: how many were admitted since the first of the waiting ones could have been.
    """

    def __init__(self, tenant: str, weight: float, serial: int, served: float) -> None:
        self.tenant = tenant
        self.serial = serial
        self.served = served
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=_rank)
        self.running: SortedKeyList[Request] = SortedKeyList(key=_rank)
        self.following: set[Request] = set()
        self.num_passed_over = 0
        self.weight = weight

    @property
    def has_prefills(self) -> bool:
        """Whether it could use tokens beyond those of its decoding requests."""
        return bool(self.waiting) or any(not request.is_decoding for request in self.running)

    @property
    def is_left_out(self) -> bool:
        """Whether it waits and has nobody running."""
        return bool(self.waiting) and not self.running

    @property
    def is_empty(self) -> bool:
        """Whether it has no requests."""
        return not (self.waiting or self.running or self.following)

    def requests(self) -> list[Request]:
        """All of them."""
        return [*self.running, *self.following, *self.waiting]

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Complexity: O(log requests)."""
        if request in self.following:
            self.following.remove(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            if request is self.waiting[0]:
                self.num_passed_over = 0
            self.waiting.remove(request)

    def charge(self, tokens: int) -> None:
        """Count tokens that are computed for it."""
        self.served += tokens / self.weight


class TenantQueues:
    """The queues of all tenants that have requests.

    A tenant that comes, or comes back, is where its fair share would have taken it, or further if it was: a pause earns
    nothing, and those that stay do not wait for ever behind those that come.

    Args:
        weights: by tenant; 1 for the others.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._open: dict[str, TenantQueue] = {}
        self._served_before: OrderedDict[str, float] = OrderedDict()  # of tenants without requests
        self._fair_share = 0.0  # what a tenant would have been served that always had requests
        self._num_opened = 0

    def __iter__(self) -> Iterator[TenantQueue]:
        return iter(self._open.values())

    def __getitem__(self, tenant: str) -> TenantQueue:
        return self._open[tenant]

    def open(self, tenant: str) -> TenantQueue:
        """The queue of a tenant, made if there is none."""
        queue = self._open.get(tenant)
        if queue is None:
            served = max(self._fair_share, self._served_before.pop(tenant, 0.0))
            queue = self._open[tenant] = TenantQueue(tenant, self._weights.get(tenant, 1.0), self._num_opened, served)
            self._num_opened += 1
        return queue

    def close_if_empty(self, queue: TenantQueue) -> None:
        """Forget a queue without requests."""
        if not queue.is_empty or self._open.get(queue.tenant) is not queue:
            return
        del self._open[queue.tenant]
        if queue.served > self._fair_share:
            self._served_before[queue.tenant] = queue.served
            if len(self._served_before) > _MAX_IDLE_TENANTS:
                self._served_before.popitem(last=False)

    def advance(self, tokens: int) -> None:
        """Note how far everybody would be if so many more tokens had been shared exactly.

        Not only how far the least served is: that one may be new, and the next one that comes too, for ever.
        """
        weights = sum(queue.weight for queue in self)
        if weights:
            least_served = min(queue.served for queue in self)
            self._fair_share = max(self._fair_share + tokens / weights, least_served)


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
