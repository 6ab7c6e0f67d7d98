"""Decides which tokens one step computes."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_queue import TenantQueue, TenantQueues

# Tokens are handed out to tenants in turns of at least this many, and in at most this many turns a step: no tenant's
# share is off by more than a turn.
_MIN_TURN_TOKENS = 64
_MAX_TURNS = 16
# If a tenant's running prefills need more than its turn, one token in this many goes to those with the fewest left.
_SHORT_SHARE = 2
# The waiting requests of a tenant among which the one with the longest cached prefix is chosen. A look costs a match,
# some microseconds, so that a step has a bound, too.
_WINDOW = 16
_MAX_LOOKS = 64
# A path of this many nodes costs as much as a look does otherwise, some 20 us; a token of a small model on a GPU, too.
_NODES_A_LOOK = 64
_MAX_LOOKING_S = 0.0005  # work of a step's looks, before the last one; a look at a path of 464 nodes takes 0.26 ms
_NODES_A_TOKEN = 32
# After this much work in a step, a turn ends with the request that it admits. A hit on 131,072 tokens takes 0.3 ms in
# all: beside 48 of them at once a short prompt takes 5 to 6 ms of the engine's time, and 15 to 18 without this.
_MAX_ADMITTING_S = 0.002
# Rows of logits that a step makes beside those of next tokens: a row of 150,000 tokens takes 0.6 MB.
_MAX_PROMPT_LOGIT_ROWS = 64
# One place in this many is left to requests that can be paused; compressed generations can't.
_PAUSABLE_SHARE = 2
# The first waiting request is passed over at most this many times.
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
    """Shares the tokens of one step between tenants and requests, and admits the requests that get any. Used once.

        step   [ one token for each decoding request | prompts, a turn for the tenant that is furthest behind ... )
        turn   [ running ones, first come first served, then waiting ones | the ones with the fewest tokens left )

    Args:
        queues: the requests of all tenants. Their tokens are charged, and admitted requests are moved.
        running: all requests with blocks; the one that waits longest for a turn to decode comes first. Admitted ones
            are added, and a request that gets a token to decode goes to the end.
        blocked: the request that waits for blocks, if there is one: no other is admitted that would keep its blocks
            after the step.
        admitter: gives requests their blocks.
        max_tokens: tokens of the step.
        max_running_requests: requests that may have blocks at the same time.
        work_clock: seconds of work of this thread. After 2 ms of them a turn ends with the request that it admits.

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
        self._work_clock, self._admitting_until_s = work_clock, work_clock() + _MAX_ADMITTING_S
        self._queues = queues
        self._running = running
        self._admitter = admitter
        self._max_tokens = max_tokens
        self._max_running_requests = max_running_requests
        self._budget = max_tokens  # tokens that are left
        self._logit_rows = _MAX_PROMPT_LOGIT_ROWS  # that are left
        self._granted: dict[Request, int] = {}  # tokens of each request in the step, in the order of the slices
        self._looks: dict[Request, int] = {}  # cached tokens of the waiting requests that were looked at
        self._num_looks, self._looking_s = 0, 0.0  # one for each, and more for deep paths; their work
        places = max(1, max_running_requests - max_running_requests // _PAUSABLE_SHARE)
        self._compressed_places = places - sum(each.compression is not None for each in running)  # that are left
        self._search_tokens: dict[Request, int] = {}  # what finding the cached tokens of a request costs, in tokens

    def make_slices(self) -> list[Slice]:
        """Hand out the step's tokens. Returns a slice for each request that gets any."""
        left_out = self._serve_decodes()
        turns = [(queue.served, queue.serial, queue) for queue in self._queues if queue.has_prefills]
        heapq.heapify(turns)
        while turns and self._budget:
            _, serial, queue = heapq.heappop(turns)
            turn = self._budget
            if turns:
                turn = min(turn, max(_MIN_TURN_TOKENS, self._max_tokens // _MAX_TURNS))
            if self._serve(queue, turn) == turn:
                heapq.heappush(turns, (queue.served, serial, queue))
        self._decode(left_out)  # with the tokens that were kept for prompts and not used
        self._queues.advance(self._max_tokens - self._budget)
        return [
            Slice(request, request.computed_upto, request.computed_upto + tokens)
            for request, tokens in self._granted.items()
        ]

    def _serve_decodes(self) -> list[Request]:
        """Give each decoding request one token, or as many of them as there are tokens. Returns those that got none."""
        decoding = [request for request in self._running if request.is_decoding]
        most = self._max_tokens
        if any(queue.has_prefills for queue in self._queues):
            most = max(1, most - min(_MIN_TURN_TOKENS, most // 2))
        if len(decoding) > most:
            decoding.sort(key=lambda request: self._queues[request.tenant].served)
        self._decode(decoding[:most])
        return decoding[most:]

    def _decode(self, requests: list[Request]) -> None:
        """Give each request one token while there are any. A request that gets one is the last to get the next."""
        for request in requests:
            if self._grant(request, 1):
                del self._running[request]
                self._running[request] = None

    def _serve(self, queue: TenantQueue, turn: int) -> int:
        """Serve one tenant, using at most `turn` tokens of the step. Returns the tokens used."""
        left = turn
        prefills = [request for request in queue.running if self._left(request) and not request.is_decoding]
        if sum(map(self._left, prefills)) >= turn:
            left -= self._serve_short(queue, prefills, turn // _SHORT_SHARE)
        for request in prefills:
            left -= self._grant(request, left)
        while left and (request := self._next_of(queue, left)) is not None:
            admission, used = self._serve_new(queue, request, left)
            left -= used
            if admission is Admission.NO_ROOM:
                self.blocked = request
            must_wait = admission in (Admission.NO_ROOM, Admission.OVER_QUOTA)
            if must_wait or self._work_clock() >= self._admitting_until_s:
                break
        if left and self.blocked is not None:
            left -= self._serve_passing(queue, left)
        return turn - left

    def _serve_short(self, queue: TenantQueue, prefills: list[Request], share: int) -> int:
        """Serve requests that have fewer tokens left than the first running prefill, the one with the fewest first.

        Returns:
            The tokens used, at most `share`.
        """
        first, *others = prefills
        candidates = [(self._admitter.urgent_tokens(each) - self._granted.get(each, 0), each) for each in others]
        candidates += [(request.num_tokens - cached, request) for request, cached in self._window(queue)]
        left = share
        for tokens, request in sorted(candidates, key=lambda candidate: (candidate[0], candidate[1].rank)):
            if not left or tokens >= self._left(first):
                break
            if request in self._running:
                left -= self._grant(request, left)
            elif self._has_place_for(queue) and (self.blocked is None or self._ends_with(request, left)):
                left -= self._serve_new(queue, request, left)[1]
        return share - left

    def _serve_passing(self, queue: TenantQueue, share: int) -> int:
        """Serve requests that give all their blocks back with the step, while another request waits for blocks.

        Returns:
            The tokens used, at most `share`.
        """
        left = share
        for request, _ in self._window(queue):
            if self._has_place_for(queue) and self._ends_with(request, left):
                left -= self._serve_new(queue, request, left)[1]
        return share - left

    def _serve_new(self, queue: TenantQueue, request: Request, left: int) -> tuple[Admission, int]:
        """Serve a waiting request if it is admitted, or charge its tenant for its refusal. Returns the tokens used."""
        admission, used = self._admit(queue, request, left), 0
        if admission is Admission.ADMITTED:
            used = self._grant(request, left)
        elif admission is Admission.ENDED:
            cost = 1 + request.num_nodes // _NODES_A_TOKEN
            used = min(cost, left, self._budget)
            self._budget -= used
            self._queues.charge(queue, cost)
        return admission, used

    def _ends_with(self, request: Request, left: int) -> bool:
        """Whether a waiting request would give all its blocks back after this step, with `left` tokens for it."""
        tokens = request.num_tokens - self._looks.get(request, 0)
        return tokens <= left and request.generation is None and not request.params.hold_lease

    def _next_of(self, queue: TenantQueue, left: int) -> Request | None:
        """Choose the tenant's next request to admit, with `left` tokens for it; None if no request may be admitted."""
        if not self._has_place_for(queue):
            return None
        if self.blocked is not None:
            return self.blocked if self.blocked in queue.waiting else None
        first = next(self._candidates(queue), None)
        if first is None or len(queue.waiting) == 1:
            return first
        if queue.num_passed_over >= _MAX_PASSED_OVER or self._takes_all(queue, left):
            return first
        equals = [look for look in self._window(queue) if look[0].params.urgency == first.params.urgency]
        return max(equals, key=lambda look: look[1])[0]  # of equally long prefixes the first

    def _takes_all(self, queue: TenantQueue, left: int) -> bool:
        """Whether `left` tokens are enough for all waiting requests, so that their order does not matter."""
        if len(queue.waiting) > min(_WINDOW, self._max_running_requests - len(self._running)):
            return False
        num_tokens: int = sum(request.num_tokens for request in queue.waiting)
        return num_tokens <= left

    def _admit(self, queue: TenantQueue, request: Request, left: int) -> Admission:
        """Try to admit a waiting request, with `left` tokens for it, and move it where it belongs then."""
        if request.compression is not None and not self._compressed_places:
            self.blocked = None if self.blocked is request else self.blocked
            return Admission.OVER_QUOTA
        is_first = request is next(self._candidates(queue))
        is_passing = self._ends_with(request, left)
        admission = self._admitter.admit(request, self._looks.get(request), self._running, is_passing=is_passing)
        if admission is Admission.ADMITTED:
            queue.waiting.remove(request)
            queue.running.add(request)
            self._running[request] = None
            self._compressed_places -= request.compression is not None
            queue.num_passed_over = 0 if is_first else queue.num_passed_over + 1
            self._search_tokens[request] = request.num_nodes // _NODES_A_TOKEN
        elif admission is Admission.FOLLOWS:
            queue.waiting.remove(request)
            queue.following.add(request)
        if self.blocked is request and admission is not Admission.NO_ROOM:
            self.blocked = None
        return admission

    def _candidates(self, queue: TenantQueue) -> Iterator[Request]:
        """Yield the waiting requests of a tenant, without compressed generations while no place is left for them."""
        return (each for each in queue.waiting if each.compression is None or self._compressed_places)

    def _window(self, queue: TenantQueue) -> list[tuple[Request, int]]:
        """List the first candidates of a tenant, each with its cached tokens."""
        window: list[tuple[Request, int]] = []
        for request in itertools.islice(self._candidates(queue), _WINDOW):
            if request not in self._looks:
                if window and (self._num_looks >= _MAX_LOOKS or self._looking_s >= _MAX_LOOKING_S):
                    break
                self._look(request)
            window.append((request, self._looks[request]))
        return window

    def _look(self, request: Request) -> None:
        start_s = self._work_clock()
        self._looks[request], num_nodes = self._admitter.look(request)
        self._looking_s += self._work_clock() - start_s
        self._num_looks += 1 + num_nodes // _NODES_A_LOOK

    def _has_place_for(self, queue: TenantQueue) -> bool:
        """Whether a tenant may have one more running. A tenant with some leaves room for those that have none."""
        num_free = self._max_running_requests - len(self._running)
        if num_free <= 0 or not queue.running:
            return num_free > 0
        left_out = (other for other in self._queues if other.is_left_out)
        return len(list(itertools.islice(left_out, num_free))) < num_free

    def _left(self, request: Request) -> int:
        """Tokens of a running request that are not in the step yet."""
        return request.num_left - self._granted.get(request, 0)

    def _grant(self, request: Request, tokens: int) -> int:
        """Put at most `tokens` more tokens of a request into the step.

        What it cost to find its cached tokens is charged to its tenant, and takes the place of tokens.

        Returns:
            Tokens of the step that are used.
        """
        granted = min(self._left(request), tokens, self._budget)
        if request.wants_all_logits:
            granted = min(granted, self._logit_rows)
            self._logit_rows -= granted
        if not granted:
            return 0
        search = self._search_tokens.pop(request, 0)
        used = min(granted + search, tokens, self._budget)
        self._granted[request] = self._granted.get(request, 0) + granted
        self._budget -= used
        self._queues[request.tenant].charge(granted + search)
        return used
