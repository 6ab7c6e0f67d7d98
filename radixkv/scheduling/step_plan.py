"""The plan of one step: which tokens it computes, and which requests it admits."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import NamedTuple

from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_queue import TenantQueue, TenantQueues

# The tokens of a tenant's turn: those of the step divided by the first number, but at least the second number. No
# tenant's share differs from the fair one by more than a turn.
_MAX_TURNS = 16
_MIN_TURN_TOKENS = 64
# If a tenant's running prefills need its whole turn, up to one token in this many is given to the prefills with the
# fewest tokens left.
_SHORT_SHARE = 2
# The number of waiting requests of a tenant among which the one with the longest cached prefix is chosen. Each costs a
# cache lookup of some microseconds, so the lookups per step are bounded too.
_MAX_CANDIDATES = 16
_MAX_LOOKUPS = 64
# Visiting this many nodes takes about 20 us: as long as the rest of a lookup, or as computing a token of a small model
# on a GPU.
_NODES_PER_LOOKUP = 64
# After this much CPU time of lookups in a step, no more requests are looked up, apart from each tenant's first one. A
# lookup of a path of 464 nodes takes 0.26 ms.
_MAX_LOOKUP_S = 0.0005
# One token is charged for each of this many nodes that are searched for cached tokens.
_NODES_PER_TOKEN = 32
# After this much CPU time in a step, a turn ends with the request that it admits, apart from short prompts. Admitting
# a hit of 131,072 tokens takes 0.3 ms. Next to 48 such requests, a short prompt takes 5 to 6 ms of the engine's time;
# without this bound, it would take 15 to 18 ms.
_MAX_ADMISSION_S = 0.002
# Rows of logits that a step computes for the log probabilities of prompts, in addition to those of next tokens. A row
# for a vocabulary of 150,000 tokens takes 0.6 MB.
_MAX_PROMPT_LOGIT_ROWS = 64
# One in this many of the places for running requests is closed to compressed generations, which cannot be preempted.
_PREEMPTIBLE_SHARE = 2
# After this many requests were admitted before a tenant's first waiting one, the first one is chosen next.
_MAX_PASSED_OVER = 16


class Slice(NamedTuple):
    """The part `[start, end)` of a request's tokens."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the next token is known after this slice."""
        return self.end == self.request.num_tokens


class StepPlan:
    """Distributes the tokens of one step to tenants and requests, and admits the requests that get any. Used once.

        step   [ one token for each decoding request | turns for prompts, the tenant with the lowest charge first ]
        turn   [ prompts with the fewest tokens left, up to half | running prompts in order, then waiting ones    ]

    If there are more decoding requests than tokens, those of the tenants with the lowest charge come first. While there
    are prompts, up to 64 tokens, at most half of the step, are reserved for them. The first part of a turn is empty if
    the tenant's running prompts do not need the whole turn.

    Args:
        queues: the requests of all tenants. Tokens are charged to them, and admitted requests are moved.
        running: all requests with blocks; the one that has waited longest for a token to decode comes first. Admitted
            requests are added, and a request that gets a token to decode moves to the end.
        blocked: the request that waits for blocks, if any: no other request is admitted that would keep its blocks
            after the step.
        admitter: allocates the blocks of requests.
        max_tokens: tokens of the step.
        max_running_requests: requests that may have blocks at the same time.
        work_clock: CPU seconds of this thread. After 2 ms of them, a turn ends with the request that it admits.

    Attributes:
        blocked: the request that waits for blocks now.
    """

    def __init__(
        self,
        queues: TenantQueues,
        running: dict[Request, None],
        blocked: Request | None,
        admitter: Admitter,
        max_tokens: int,
        max_running_requests: int,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.blocked = blocked
        self._work_clock = work_clock
        self._admission_end_s = work_clock() + _MAX_ADMISSION_S
        self._queues = queues
        self._running = running
        self._admitter = admitter
        self._max_tokens = max_tokens
        self._max_running_requests = max_running_requests
        self._budget = max_tokens  # tokens that are left
        self._logit_rows_left = _MAX_PROMPT_LOGIT_ROWS
        self._granted: dict[Request, int] = {}  # tokens of each request in the step, in the order of the slices
        self._cached_tokens: dict[Request, int] = {}  # of the waiting requests that were looked up
        self._num_lookups = 0  # a deep path counts as several
        self._lookup_s = 0.0  # CPU time of the lookups
        self._compressed_places_left = max(1, max_running_requests - max_running_requests // _PREEMPTIBLE_SHARE)
        for request in running:
            if request.compression is not None:
                self._compressed_places_left -= 1
        self._search_tokens: dict[Request, int] = {}  # the cost of finding a request's cached tokens, in tokens

    def make_slices(self) -> list[Slice]:
        """Distribute the step's tokens. Returns a slice for each request that gets any."""
        prefilling = [queue for queue in self._queues.by_tenant.values() if queue.has_prefills]
        unserved_decodes = self._serve_decodes(has_prefills=bool(prefilling))
        turns = [(queue.served, queue.serial, queue) for queue in prefilling]
        heapq.heapify(turns)
        while turns and self._budget:
            _, serial, queue = heapq.heappop(turns)
            turn_tokens = self._budget
            if turns:
                turn_tokens = min(turn_tokens, max(_MIN_TURN_TOKENS, self._max_tokens // _MAX_TURNS))
            if self._serve_tenant(queue, turn_tokens) == turn_tokens:
                heapq.heappush(turns, (queue.served, serial, queue))
        self._decode(unserved_decodes)  # with the tokens that were reserved for prompts and not used
        self._queues.advance(self._max_tokens - self._budget)
        return [
            Slice(request, request.computed_upto, request.computed_upto + tokens)
            for request, tokens in self._granted.items()
        ]

    def _serve_decodes(self, *, has_prefills: bool) -> list[Request]:
        """Give a token to each decoding request, or to as many as there are tokens. Returns those that got none."""
        decoding = [request for request in self._running if request.is_decoding]
        max_decodes = self._max_tokens
        if has_prefills:
            max_decodes = max(1, max_decodes - min(_MIN_TURN_TOKENS, max_decodes // 2))
        if len(decoding) > max_decodes:
            decoding.sort(key=lambda request: self._queues[request.tenant].served)
        self._decode(decoding[:max_decodes])
        return decoding[max_decodes:]

    def _decode(self, requests: list[Request]) -> None:
        """Give each request one token while there are any. A request that gets one moves to the end."""
        for request in requests:
            if self._grant(request, 1):
                del self._running[request]
                self._running[request] = None

    def _serve_tenant(self, queue: TenantQueue, turn_tokens: int) -> int:
        """Serve one tenant, using at most `turn_tokens` of the step. Returns the tokens used."""
        tokens_left = turn_tokens
        if queue.running:
            prefills = [request for request in queue.running if self._num_left(request) and not request.is_decoding]
            if prefills and sum(map(self._num_left, prefills)) >= turn_tokens:
                tokens_left -= self._serve_short(queue, prefills, turn_tokens // _SHORT_SHARE)
            for request in prefills:
                tokens_left -= self._grant(request, tokens_left)
        while tokens_left and (request := self._next_to_admit(queue, tokens_left)) is not None:
            admission, used = self._serve_new(queue, request, tokens_left)
            tokens_left -= used
            if admission is Admission.NO_ROOM:
                self.blocked = request
            must_wait = admission in (Admission.NO_ROOM, Admission.OVER_QUOTA)
            if must_wait or self._work_clock() >= self._admission_end_s:
                break
        if tokens_left and self.blocked is not None:
            tokens_left -= self._serve_ending_with_step(queue, tokens_left)
        return turn_tokens - tokens_left

    def _serve_short(self, queue: TenantQueue, prefills: list[Request], max_tokens: int) -> int:
        """Serve requests that have fewer tokens left than the first running prefill, the one with the fewest first.

        Returns:
            The tokens used, at most `max_tokens`.
        """
        first, *others = prefills
        # Pairs of the number of tokens left and the request: first running requests, then waiting ones.
        by_length = [(self._admitter.urgent_tokens(each) - self._granted.get(each, 0), each) for each in others]
        by_length += [(request.num_tokens - cached, request) for request, cached in self._candidates(queue)]
        by_length.sort(key=lambda pair: (pair[0], pair[1].rank))
        tokens_left = max_tokens
        for num_left, request in by_length:
            if not tokens_left or num_left >= self._num_left(first):
                break
            if request in self._running:
                tokens_left -= self._grant(request, tokens_left)
            elif self._has_place_for(queue) and (self.blocked is None or self._ends_with_step(request, tokens_left)):
                tokens_left -= self._serve_new(queue, request, tokens_left)[1]
        return max_tokens - tokens_left

    def _serve_ending_with_step(self, queue: TenantQueue, max_tokens: int) -> int:
        """Serve requests that release all their blocks at the end of the step, while another request waits for blocks.

        Returns:
            The tokens used, at most `max_tokens`.
        """
        tokens_left = max_tokens
        for request, _ in self._candidates(queue):
            if self._has_place_for(queue) and self._ends_with_step(request, tokens_left):
                tokens_left -= self._serve_new(queue, request, tokens_left)[1]
        return max_tokens - tokens_left

    def _serve_new(self, queue: TenantQueue, request: Request, tokens_left: int) -> tuple[Admission, int]:
        """Try to admit and serve a waiting request. If it is refused, charge its tenant for the search of the tree.

        Returns:
            The outcome, and the tokens used.
        """
        admission = self._admit(queue, request, tokens_left)
        used = 0
        if admission is Admission.ADMITTED:
            used = self._grant(request, tokens_left)
        elif admission is Admission.ENDED:
            cost = 1 + request.num_nodes // _NODES_PER_TOKEN
            used = min(cost, tokens_left, self._budget)
            self._budget -= used
            self._queues.charge(queue, cost)
        return admission, used

    def _ends_with_step(self, request: Request, tokens_left: int) -> bool:
        """Whether a waiting request would end with this step, given `tokens_left` tokens for it."""
        if request.generation is not None or request.params.hold_lease:
            return False
        return request.num_tokens - self._cached_tokens.get(request, 0) <= tokens_left

    def _next_to_admit(self, queue: TenantQueue, tokens_left: int) -> Request | None:
        """Choose the tenant's next request to admit, given `tokens_left` for it; None if none may be admitted."""
        if not queue.waiting or not self._has_place_for(queue):
            return None
        if self.blocked is not None:
            return self.blocked if self.blocked in queue.waiting else None
        first = self._first_candidate(queue)
        if first is None or len(queue.waiting) == 1:
            return first
        if queue.num_passed_over >= _MAX_PASSED_OVER or self._has_tokens_for_all(queue, tokens_left):
            return first
        equally_urgent = [
            (request, cached_tokens)
            for request, cached_tokens in self._candidates(queue)
            if request.params.urgency == first.params.urgency
        ]
        return max(equally_urgent, key=lambda candidate: candidate[1])[0]  # the first of equally long prefixes

    def _has_tokens_for_all(self, queue: TenantQueue, tokens_left: int) -> bool:
        """Whether `tokens_left` tokens are enough for all waiting requests, so that their order does not matter."""
        if len(queue.waiting) > min(_MAX_CANDIDATES, self._max_running_requests - len(self._running)):
            return False
        num_tokens: int = sum(request.num_tokens for request in queue.waiting)
        return num_tokens <= tokens_left

    def _admit(self, queue: TenantQueue, request: Request, tokens_left: int) -> Admission:
        """Try to admit a waiting request, given `tokens_left` for it, and move it to the requests in its new state."""
        if request.compression is not None and not self._compressed_places_left:
            if self.blocked is request:
                self.blocked = None
            return Admission.OVER_QUOTA
        is_first = request is self._first_candidate(queue)
        ends_with_step = self._ends_with_step(request, tokens_left)
        cached_tokens = self._cached_tokens.get(request)
        admission = self._admitter.admit(request, cached_tokens, self._running, ends_with_step=ends_with_step)
        if admission is Admission.ADMITTED:
            queue.waiting.remove(request)
            queue.running.add(request)
            self._running[request] = None
            if request.compression is not None:
                self._compressed_places_left -= 1
            queue.num_passed_over = 0 if is_first else queue.num_passed_over + 1
            self._search_tokens[request] = request.num_nodes // _NODES_PER_TOKEN
        elif admission is Admission.FOLLOWS:
            queue.waiting.remove(request)
            queue.following.add(request)
        if self.blocked is request and admission is not Admission.NO_ROOM:
            self.blocked = None
        return admission

    def _first_candidate(self, queue: TenantQueue) -> Request | None:
        """Return the first waiting request of a tenant that may be admitted; None if there is none."""
        for request in queue.waiting:
            if request.compression is None or self._compressed_places_left:
                candidate: Request = request
                return candidate
        return None

    def _candidates(self, queue: TenantQueue) -> list[tuple[Request, int]]:
        """List the first waiting requests of a tenant that may be admitted, each with its cached tokens.

        Looks up the requests that this step has not looked up yet, and lists fewer if that takes too long.
        """
        candidates: list[tuple[Request, int]] = []
        for request in queue.waiting:
            if request.compression is not None and not self._compressed_places_left:
                continue
            if request not in self._cached_tokens:
                has_looked_up_enough = self._num_lookups >= _MAX_LOOKUPS or self._lookup_s >= _MAX_LOOKUP_S
                if candidates and has_looked_up_enough:
                    break
                self._look_up(request)
            candidates.append((request, self._cached_tokens[request]))
            if len(candidates) == _MAX_CANDIDATES:
                break
        return candidates

    def _look_up(self, request: Request) -> None:
        start_s = self._work_clock()
        self._cached_tokens[request], num_nodes = self._admitter.look_up(request)
        self._lookup_s += self._work_clock() - start_s
        self._num_lookups += 1 + num_nodes // _NODES_PER_LOOKUP

    def _has_place_for(self, queue: TenantQueue) -> bool:
        """Whether a tenant may have one more running request, reserving one for each waiting tenant that has none."""
        num_free_places = self._max_running_requests - len(self._running)
        if num_free_places <= 0 or not queue.running:
            return num_free_places > 0
        for other in self._queues.by_tenant.values():
            num_free_places -= other.is_left_out
            if not num_free_places:
                return False
        return True

    def _num_left(self, request: Request) -> int:
        """Tokens of a running request that are not in the step yet."""
        return request.num_tokens - request.computed_upto - self._granted.get(request, 0)

    def _grant(self, request: Request, max_tokens: int) -> int:
        """Put at most `max_tokens` more tokens of a request into the step.

        The cost of finding its cached tokens is charged to its tenant, and uses tokens of the step.

        Returns:
            Tokens of the step that are used.
        """
        granted = min(self._num_left(request), max_tokens, self._budget)
        if request.generation is not None and request.wants_all_logits:
            granted = min(granted, self._logit_rows_left)
            self._logit_rows_left -= granted
        if not granted:
            return 0
        search_tokens = self._search_tokens.pop(request, 0)
        used = min(granted + search_tokens, max_tokens, self._budget)
        self._granted[request] = self._granted.get(request, 0) + granted
        self._budget -= used
        self._queues[request.tenant].charge(granted + search_tokens)
        return used
