"""The scheduler: keeps the unfinished requests, and plans the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from radixkv.scheduling.admission import Admitter
from radixkv.scheduling.request import Request
from radixkv.scheduling.step_budget import StepBudget
from radixkv.scheduling.step_plan import Slice, StepPlan
from radixkv.scheduling.tenant_queue import TenantQueues


class Scheduler:
    """Shares each step between tenants by weight, and a tenant's share between its requests.

        add ─▶ waiting ─▶ running ─▶ remove
                ▲  │ ▲       │
         resume │  ▼ └───────┘ preempt
               following

    Between tenants: the tenant for which the fewest tokens were computed, relative to its weight, has the next turn
    (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Cached tokens do not count, apart from the
    cost of finding them (see `StepPlan`), so a tenant's charge depends only on the work that was done for it.

    Within a tenant: of the first 16 waiting requests, among those with the urgency of the first one, the request with
    the longest cached prefix is admitted next. After 16 others were admitted before the first one, it is next. While
    the running requests need the whole turn, up to half of it is given to the requests with the fewest tokens left,
    including waiting ones. So a short prompt does not wait for a long document, and the document takes at most twice as
    long.

    A request is admitted when the step has tokens for it, not earlier, so that it matches everything that was published
    before. If there are no blocks for it, only short prefills that end with the step are admitted before it. So no
    request starves.

    Args:
        budget: tokens per step.
        max_running_requests: requests that may run at the same time.
        weights: shares by tenant; 1 for a tenant that is missing.
        work_clock: CPU seconds of the calling thread; see `StepPlan`.

    Attributes:
        budget: as in the arguments; the engine adjusts it between steps.
        running: the requests that hold blocks; the one that has waited longest for a token to decode comes first.
    """

    def __init__(
        self,
        budget: StepBudget,
        max_running_requests: int,
        weights: Mapping[str, float] | None = None,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._work_clock = work_clock
        self.budget = budget
        self._max_running_requests = max_running_requests
        self._queues = TenantQueues(weights or {})
        self.running: dict[Request, None] = {}
        self._blocked: Request | None = None  # waits for blocks
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to be admitted."""
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def num_following(self) -> int:
        """Number of requests that wait for tokens of a running request, or for blocks that are being loaded."""
        return sum(len(queue.following) for queue in self._queues)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of requests runs, and each tenant with waiting requests has a running one."""
        return len(self.running) >= self._max_running_requests and not any(queue.is_left_out for queue in self._queues)

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits to be admitted."""
        return bool(self.running) or any(queue.waiting for queue in self._queues.by_tenant.values())

    def add(self, request: Request) -> None:
        """Add a new request. Complexity: O(log waiting)."""
        request.set_arrival(self._num_arrived)
        self._num_arrived += 1
        self._queues.open(request.tenant).waiting.add(request)

    def requests(self) -> list[Request]:
        """List all unfinished requests."""
        return [request for queue in self._queues for request in queue.requests()]

    def idle_requests(self) -> list[Request]:
        """List the unfinished requests that hold no blocks."""
        return [request for queue in self._queues for request in (*queue.waiting, *queue.following)]

    def hold_back(self, request: Request) -> None:
        """Exclude a waiting request from admission while its blocks are loaded, until `resume`. O(log waiting)."""
        queue = self._queues[request.tenant]
        queue.waiting.remove(request)
        queue.following.add(request)

    def resume(self, followers: Iterable[Request]) -> None:
        """Put followers back among the waiting requests, at their old positions. Complexity: O(log waiting) each."""
        for request in followers:
            queue = self._queues[request.tenant]
            queue.following.remove(request)
            queue.waiting.add(request)

    def preempt(self, request: Request) -> None:
        """Put a running request back among the waiting ones, at its old position. Complexity: O(log waiting)."""
        queue = self._queues[request.tenant]
        del self.running[request]
        queue.running.remove(request)
        queue.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request in any state. Complexity: O(log waiting)."""
        queue = self._queues[request.tenant]
        if request in self.running:
            del self.running[request]
        queue.remove(request)
        if self._blocked is request:
            self._blocked = None
        self._queues.close_if_empty(queue)

    def request_to_preempt(self) -> Request | None:
        """Choose the request to preempt so that a waiting tenant without running requests can run one.

        Returns:
            The request; None if no tenant needs that, or no request can be preempted for it.
        """
        if len(self.running) < self._max_running_requests or not any(queue.is_left_out for queue in self._queues):
            return None
        preemptible = {queue: [each for each in queue.running if each.compression is None] for queue in self._queues}
        largest = max(self._queues, key=lambda queue: (bool(preemptible[queue]), len(queue.running)))
        if len(largest.running) < 2 or not preemptible[largest]:
            return None
        youngest: Request = max(preemptible[largest], key=lambda request: request.arrival)
        return youngest

    def next_step(self, admitter: Admitter) -> list[Slice]:
        """Choose the slices of the next step, and admit the waiting requests that get one; see `StepPlan`."""
        plan = StepPlan(
            self._queues,
            self.running,
            self._blocked,
            admitter,
            self.budget.num_tokens,
            self._max_running_requests,
            self._work_clock,
        )
        slices = plan.make_slices()
        self._blocked = plan.blocked
        for queue in list(self._queues.by_tenant.values()):
            self._queues.close_if_empty(queue)
        return slices

    def next_tokens(self) -> list[Slice]:
        """Return the next step while all running requests decode and none is admitted, and charge its tokens.

        Returns:
            One token for each running request.
        """
        for request in self.running:
            self._queues[request.tenant].charge(1)
        self._queues.advance(len(self.running))
        return [Slice(request, request.computed_upto, request.computed_upto + 1) for request in self.running]
