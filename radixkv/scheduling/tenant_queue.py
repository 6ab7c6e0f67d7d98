"""The unfinished requests of each tenant, and the tokens that were charged to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.cache.tenants import RecentTenants
from radixkv.scheduling.request import Request

_rank = attrgetter("rank")


class TenantQueue:
    """The unfinished requests of one tenant.

    Attributes:
        tenant: its name.
        weight: its share in proportion to the other tenants' weights.
        serial: number of queues that were opened before.
        served: its charge: the tokens that were charged to it, divided by its weight. A tenant that arrives or returns
            does not start at 0; see `TenantQueues`.
        waiting, running: requests without and with blocks, ordered by rank.
        following: requests that wait for tokens that a running request computes, or for blocks that are being loaded.
        num_passed_over: number of requests that were admitted before the first waiting one.
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
        """Whether any request waits to be admitted, or runs and is not decoding."""
        return bool(self.waiting) or any(not request.is_decoding for request in self.running)

    @property
    def is_left_out(self) -> bool:
        """Whether it has waiting requests and no running ones."""
        return bool(self.waiting) and not self.running

    def requests(self) -> list[Request]:
        """List all requests."""
        return [*self.running, *self.following, *self.waiting]

    def remove(self, request: Request) -> None:
        """Forget a request in any state. Complexity: O(log requests)."""
        if request in self.following:
            self.following.remove(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            if request is self.waiting[0]:
                self.num_passed_over = 0
            self.waiting.remove(request)

    def charge(self, tokens: int) -> None:
        """Charge the tenant for `tokens` that a step computes for it."""
        self.served += tokens / self.weight


class TenantQueues:
    """The queues of all tenants that have requests.

    A tenant that arrives or returns starts at the fair share, or at its previous charge if that is higher. So a tenant
    gains nothing by being idle, and tenants with constant load do not starve when new tenants arrive.

    Args:
        weights: shares by tenant; 1 for a tenant that is missing.

    Attributes:
        by_tenant: the queues that have requests, in the order in which they were opened.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.by_tenant: dict[str, TenantQueue] = {}
        self._weights = weights
        self._served_before: RecentTenants[float] = RecentTenants()  # of tenants without requests
        self._fair_share = 0.0  # `served` of a tenant that always had requests
        self._num_opened = 0

    def __iter__(self) -> Iterator[TenantQueue]:
        return iter(self.by_tenant.values())

    def __getitem__(self, tenant: str) -> TenantQueue:
        return self.by_tenant[tenant]

    def open(self, tenant: str) -> TenantQueue:
        """Return the queue of a tenant, and create it if there is none."""
        queue = self.by_tenant.get(tenant)
        if queue is None:
            served = max(self._fair_share, self._served_before.pop(tenant, 0.0))
            queue = TenantQueue(tenant, self._weights.get(tenant, 1.0), self._num_opened, served)
            self.by_tenant[tenant] = queue
            self._num_opened += 1
        return queue

    def close_if_empty(self, queue: TenantQueue) -> None:
        """Forget a queue without requests."""
        if queue.waiting or queue.running or queue.following or self.by_tenant.get(queue.tenant) is not queue:
            return
        del self.by_tenant[queue.tenant]
        self._remember(queue)

    def charge(self, queue: TenantQueue, tokens: int) -> None:
        """Charge a tenant for `tokens`, even if its last request has ended and its queue is closed."""
        queue.charge(tokens)
        if self.by_tenant.get(queue.tenant) is not queue:
            self._remember(queue)

    def advance(self, tokens: int) -> None:
        """Raise the fair share by `tokens` that a step computes, shared exactly by weight, or to the lowest charge.

        New tenants do not start at the lowest charge of all tenants. If they did, each of many new tenants in turn
        would have the lowest charge, and the tenants that stay would wait for all of them.
        """
        if not self.by_tenant:
            return
        total_weight = 0.0
        min_served = float("inf")
        for queue in self.by_tenant.values():
            total_weight += queue.weight
            min_served = min(min_served, queue.served)
        self._fair_share = max(self._fair_share + tokens / total_weight, min_served)

    def _remember(self, queue: TenantQueue) -> None:
        if queue.served > self._fair_share:
            self._served_before.add(queue.tenant, queue.served)
