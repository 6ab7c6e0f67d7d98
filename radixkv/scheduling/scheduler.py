"""Which tokens are computed in the next step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_queue import TenantQueue, TenantQueues


class Slice(NamedTuple):
    """The part `[start, end)` of a request's tokens."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the next token is known after this."""
        return self.end == self.request.num_tokens


# Tokens are handed out to tenants in turns of at least so many, and at most so many turns a step: the error of the
# shares is below a turn.
_MIN_TURN_TOKENS = 64
_MAX_TURNS = 16
# Of a tenant's tokens this part is for those of its requests that have the fewest left, if not all can be served.
_SHORT_SHARE = 2
# So many waiting requests of a tenant are looked at for the one with the longest cached prefix; a look costs a match,
# some microseconds, so there is a bound for a step, too.
_WINDOW = 16
_MAX_LOOKS = 64
# So often another one may be taken before the first.
_MAX_PASSED_OVER = 16


class Scheduler:
    """Shares each step between tenants by weight, and a tenant's share between its requests.

        step   [ one token for each decoding request | prompts, a turn for the tenant that is furthest behind ... )
        turn   [ running ones, first come first served, then waiting ones | the ones with the fewest tokens left )

    Between tenants: whoever was served the fewest tokens by its weight has the next turn (Sheng et al., Fairness in
    Serving Large Language Models, OSDI 2024). Hits count for nothing there, so that nobody's waiting time tells what
    another one has cached.

    Within a tenant: of the first 16 waiting ones the one with the longest cached prefix is admitted next (of those with
    the first one's priority), but by this rule the first is passed over 16 times at most. While the running ones need
    more than the turn, half of it goes to those with the fewest tokens left, waiting ones among them: a short question
    does not wait for a long document, which takes at most twice as long for it.

    A request is admitted at the last moment: when there are tokens for it in the step. So it matches the cache after
    everything before it was published. One for which there are no blocks keeps all others from being admitted until
    there are, but for short prefills that give their blocks back with the step. So nobody starves.

    Args:
        max_step_tokens: tokens a step; may be changed between steps.
        max_running_requests: requests that may be admitted at the same time.
        weights: by tenant; 1 for the others.
    """

    def __init__(
        self, max_step_tokens: int, max_running_requests: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self._queues = TenantQueues(weights or {})
        self._running: dict[Request, None] = {}  # who waits longest for a turn to decode comes first
        self._num_arrived = 0
        self.max_step_tokens = max_step_tokens
        self._max_running_requests = max_running_requests
        self._blocked: Request | None = None  # it waits for blocks, and nobody else is admitted
        # Of the step that is being made:
        self._granted: dict[Request, int] = {}
        self._budget = 0
        self._looks: dict[Request, int] = {}

    @property
    def running(self) -> list[Request]:
        """Those that hold blocks."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """How many hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many wait to be admitted."""
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def num_following(self) -> int:
        """How many wait for what a running one computes."""
        return sum(len(queue.following) for queue in self._queues)

    @property
    def is_full(self) -> bool:
        """Whether all places are taken, one at least by each tenant: nobody is admitted until a running one ends."""
        return len(self._running) >= self._max_running_requests and not any(queue.is_left_out for queue in self._queues)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running) or any(queue.waiting for queue in self._queues)

    def add(self, request: Request) -> None:
        """Take in a new request. Complexity: O(log waiting)."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._queues.open(request.params.tenant).waiting.add(request)

    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return [request for queue in self._queues for request in queue.requests()]

    def idle_requests(self) -> list[Request]:
        """Those that hold no blocks."""
        return [request for queue in self._queues for request in (*queue.waiting, *queue.following)]

    def resume(self, request: Request) -> None:
        """Put a follower back where it was among the waiting ones. Complexity: O(log waiting)."""
        queue = self._queues[request.params.tenant]
        queue.following.remove(request)
        queue.waiting.add(request)

    def pause(self, request: Request) -> None:
        """Put a running request back among the waiting ones, as old as it is."""
        queue = self._queues[request.params.tenant]
        del self._running[request]
        queue.running.remove(request)
        queue.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Complexity: O(log waiting)."""
        queue = self._queues[request.params.tenant]
        if request in self._running:
            del self._running[request]
        queue.remove(request)
        if self._blocked is request:
            self._blocked = None
        self._queues.close_if_empty(queue)

    def slot_to_free(self) -> Request | None:
        """Whom to pause because so many run that another tenant can have nobody run; None if there is no need."""
        if len(self._running) < self._max_running_requests or not any(queue.is_left_out for queue in self._queues):
            return None
        greediest = max(self._queues, key=lambda queue: len(queue.running))
        if len(greediest.running) < 2:
            return None
        youngest: Request = max(greediest.running, key=lambda request: request.arrival)
        return youngest

    # -- making a step ---------------------------------------------------------------------------------------------

    def next_step(self, admitter: Admitter) -> list[Slice]:
        """Choose the next step's slices, and admit those that get any; `admitter` gives them their blocks."""
        self._budget, self._granted, self._looks = self.max_step_tokens, {}, {}
        left_out = self._serve_decodes()
        turns = [(queue.served, queue.serial, queue) for queue in self._queues if queue.has_prefills]
        heapq.heapify(turns)
        while turns and self._budget:
            _, serial, queue = heapq.heappop(turns)
            turn = self._budget
            if turns:
                turn = min(turn, max(_MIN_TURN_TOKENS, self.max_step_tokens // _MAX_TURNS))
            if self._serve(queue, turn, admitter) == turn:
                heapq.heappush(turns, (queue.served, serial, queue))
        self._decode(left_out)  # they had to leave their token to prompts that did not need it
        slices = self._slices()
        for queue in list(self._queues):
            self._queues.close_if_empty(queue)
        return slices

    def next_tokens(self) -> list[Slice]:
        """A token for each running request: the next step while all of them decode and nobody is admitted."""
        self._budget, self._granted = self.max_step_tokens, {}
        self._decode(self.running)
        return self._slices()

    def _slices(self) -> list[Slice]:
        """Those of the step that was made."""
        self._queues.advance(self.max_step_tokens - self._budget)
        return [
            Slice(request, request.computed_upto, request.computed_upto + tokens)
            for request, tokens in self._granted.items()
        ]

    def _serve_decodes(self) -> list[Request]:
        """A token for each request that decodes, and in turn if they are too many; returns those that got none."""
        decoding = [request for request in self._running if request.is_decoding]
        most = self.max_step_tokens
        if any(queue.has_prefills for queue in self._queues):
            most = max(1, most - min(_MIN_TURN_TOKENS, most // 2))
        if len(decoding) > most:
            decoding.sort(key=lambda request: self._queues[request.params.tenant].served)
        self._decode(decoding[:most])
        return decoding[most:]

    def _decode(self, requests: list[Request]) -> None:
        """A token for each, as far as there are any; who gets one is the last to get the next."""
        for request in requests:
            if self._grant(request, 1):
                del self._running[request]
                self._running[request] = None

    def _serve(self, queue: TenantQueue, turn: int, admitter: Admitter) -> int:
        """Give a tenant at most so many tokens; returns how many it took."""
        left = turn
        prefills = [request for request in queue.running if self._left(request) and not request.is_decoding]
        if sum(map(self._left, prefills)) >= turn:
            left -= self._serve_short(queue, prefills, turn // _SHORT_SHARE, admitter)
        for request in prefills:
            left -= self._grant(request, left)
        while left and (request := self._next_of(queue, left, admitter)) is not None:
            admission = self._admit(queue, request, left, admitter)
            if admission is Admission.ADMITTED:
                left -= self._grant(request, left)
            elif admission is Admission.NO_ROOM:
                self._blocked = request
                break
            elif admission is Admission.OVER_QUOTA:
                break
        if left and self._blocked is not None:
            left -= self._serve_passing(queue, left, admitter)
        return turn - left

    def _serve_short(self, queue: TenantQueue, prefills: list[Request], share: int, admitter: Admitter) -> int:
        """Serve those that have fewer tokens left than the first of the running ones, the fewest first."""
        first, *others = prefills
        candidates = [(admitter.urgent_tokens(request) - self._granted.get(request, 0), request) for request in others]
        candidates += [(request.num_tokens - cached, request) for request, cached in self._window(queue, admitter)]
        left = share
        for tokens, request in sorted(candidates, key=lambda candidate: (candidate[0], candidate[1].rank)):
            if not left or tokens >= self._left(first):
                break
            if request not in self._running:
                if self._has_no_place_for(queue) or (self._blocked is not None and not self._ends_with(request, left)):
                    continue
                if self._admit(queue, request, left, admitter) is not Admission.ADMITTED:
                    continue
            left -= self._grant(request, left)
        return share - left

    def _serve_passing(self, queue: TenantQueue, share: int, admitter: Admitter) -> int:
        """Serve those that give all their blocks back with the step, while somebody else waits for blocks."""
        left = share
        for request, _ in self._window(queue, admitter):
            may_pass = not self._has_no_place_for(queue) and self._ends_with(request, left)
            if may_pass and self._admit(queue, request, left, admitter) is Admission.ADMITTED:
                left -= self._grant(request, left)
        return share - left

    def _ends_with(self, request: Request, left: int) -> bool:
        """Whether a waiting request gives all its blocks back after a step that has so many tokens left for it."""
        tokens = request.num_tokens - self._looks.get(request, 0)
        return tokens <= left and request.generation is None and not request.params.hold_lease

    def _next_of(self, queue: TenantQueue, left: int, admitter: Admitter) -> Request | None:
        """Who of a tenant is admitted next, with so many tokens left for it."""
        if self._has_no_place_for(queue) or not queue.waiting:
            return None
        if self._blocked is not None:
            return self._blocked if self._blocked in queue.waiting else None
        first: Request = queue.waiting[0]
        if len(queue.waiting) == 1 or queue.num_passed_over >= _MAX_PASSED_OVER or self._takes_all(queue, left):
            return first
        equals = [look for look in self._window(queue, admitter) if look[0].params.priority == first.params.priority]
        return max(equals, key=lambda look: look[1])[0]  # the first of those with equally much

    def _takes_all(self, queue: TenantQueue, left: int) -> bool:
        """Whether so many tokens are enough for all that wait, so that it does not matter who is the first."""
        if len(queue.waiting) > min(_WINDOW, self._max_running_requests - len(self._running)):
            return False
        num_tokens: int = sum(request.num_tokens for request in queue.waiting)
        return num_tokens <= left

    def _admit(self, queue: TenantQueue, request: Request, left: int, admitter: Admitter) -> Admission:
        """Have a waiting request admitted to a step that has so many tokens left for it."""
        is_first = request is queue.waiting[0]
        is_passing = self._ends_with(request, left)
        admission = admitter.admit(request, self._looks.get(request), self._running, is_passing=is_passing)
        if admission is Admission.ADMITTED:
            queue.waiting.remove(request)
            queue.running.add(request)
            self._running[request] = None
            queue.num_passed_over = 0 if is_first else queue.num_passed_over + 1
        elif admission is Admission.FOLLOWS:
            queue.waiting.remove(request)
            queue.following.add(request)
        if self._blocked is request and admission is not Admission.NO_ROOM:
            self._blocked = None
        return admission

    def _window(self, queue: TenantQueue, admitter: Admitter) -> list[tuple[Request, int]]:
        """The first waiting requests of a tenant, with their cached tokens."""
        window: list[tuple[Request, int]] = []
        for request in itertools.islice(queue.waiting, _WINDOW):
            if request not in self._looks and len(self._looks) >= _MAX_LOOKS and window:
                break
            if request not in self._looks:
                self._looks[request] = admitter.look(request)
            window.append((request, self._looks[request]))
        return window

    def _has_no_place_for(self, queue: TenantQueue) -> bool:
        """Whether a tenant may have no more running: a tenant that has some leaves room for those that have none."""
        num_free = self._max_running_requests - len(self._running)
        if num_free <= 0 or not queue.running:
            return num_free <= 0
        left_out = (other for other in self._queues if other.is_left_out)
        return len(list(itertools.islice(left_out, num_free))) == num_free

    def _left(self, request: Request) -> int:
        """Tokens of a running request that are not in the step yet."""
        return request.num_left - self._granted.get(request, 0)

    def _grant(self, request: Request, tokens: int) -> int:
        """Put at most so many more tokens of a request into the step; returns how many."""
        granted = min(self._left(request), tokens, self._budget)
        if granted:
            self._granted[request] = self._granted.get(request, 0) + granted
            self._budget -= granted
            self._queues[request.params.tenant].charge(granted)
        return granted
