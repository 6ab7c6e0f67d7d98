"""Which tokens are computed in the next step."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from radixkv.request import Request


class Slice(NamedTuple):
    """The part `[start, end)` of a request's prompt."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is computed after this."""
        return self.end == self.request.num_tokens


class Admission(enum.Enum):
    """What became of a request that was to be admitted."""

    ADMITTED = "it has its blocks and runs"
    FOLLOWS = "it waits for what a running request computes; those behind it may go ahead"
    TOO_LONG = "it has more tokens to compute than it may have now"
    ENDED = "it was refused"
    NO_ROOM = "it waits for blocks, and nobody behind it may have them"


# A part of each step is for waiting requests that it can answer, and so many of them are looked at: a long prompt
# takes at most 4 / 3 times as long for it, and a look costs a match, some microseconds.
_EXPRESS_SHARE = 4
_MAX_EXPRESS_LOOKS = 16


class Scheduler:
    """First come, first served, under a token budget a step, but for the express lane.

    A request is admitted at the last moment: when the step has tokens left that no running request needs. So it
    matches the cache after everything before it was published. While the running ones need more than a step, a quarter
    of it goes to waiting requests that can be answered with it: a short question does not wait for a long document.
    Whoever overtakes so is over with the step and gives its blocks back, unless it holds a lease: so nobody starves.

    Attributes:
        waiting: in the order in which they came.
        running: in the order in which they were admitted.
        following: those that wait for a running one.

    Args:
        max_step_tokens: tokens a step.
        max_running_requests: requests that may be admitted at the same time.
    """

    def __init__(self, max_step_tokens: int, max_running_requests: int) -> None:
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=lambda request: request.arrival)
        self.running: list[Request] = []
        self.following: set[Request] = set()
        self._num_arrived = 0
        self._max_step_tokens = max_step_tokens
        self._max_running_requests = max_running_requests

    def add(self, request: Request) -> None:
        """Take in a new request. Complexity: O(log waiting)."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)

    def next_step(self, admit: Callable[[Request, int], Admission]) -> list[Slice]:
        """Choose the next step's slices: the express lane, then running requests, then new ones.

        Args:
            admit: tries to give a request its blocks if it has at most so many tokens to compute, and sets
                `computed_upto`.
        """
        budget = self._max_step_tokens
        before = list(self.running)
        step = self._express(admit)
        budget -= sum(part.end - part.start for part in step)
        for request in before:
            if budget:
                budget = _take(step, request, budget)
        while budget and self.waiting and len(self.running) < self._max_running_requests:
            request = self.waiting[0]
            admission = self._admit(request, admit, request.num_tokens)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.ADMITTED:
                budget = _take(step, request, budget)
        return step

    def _express(self, admit: Callable[[Request, int], Admission]) -> list[Slice]:
        """Admit waiting requests that can be answered with a share of the step, if there is no room for them else."""
        needed = sum(request.num_tokens - request.computed_upto for request in self.running)
        if needed < self._max_step_tokens:
            return []
        budget = self._max_step_tokens // _EXPRESS_SHARE
        step: list[Slice] = []
        for request in list(itertools.islice(self.waiting, _MAX_EXPRESS_LOOKS)):
            if not budget or len(self.running) >= self._max_running_requests:
                break
            admission = self._admit(request, admit, budget)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.ADMITTED:
                budget = _take(step, request, budget)
        return step

    def _admit(self, request: Request, admit: Callable[[Request, int], Admission], most_tokens: int) -> Admission:
        admission = admit(request, most_tokens)
        if admission is Admission.ADMITTED:
            self.waiting.remove(request)
            self.running.append(request)
        elif admission is Admission.FOLLOWS:
            self.waiting.remove(request)
            self.following.add(request)
        return admission

    def resume(self, request: Request) -> None:
        """Put a follower back where it was among the waiting ones. Complexity: O(log waiting)."""
        self.following.remove(request)
        self.waiting.add(request)

    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return [*self.running, *self.following, *self.waiting]

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Complexity: O(running + log waiting)."""
        if request in self.following:
            self.following.remove(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)


def _take(step: list[Slice], request: Request, budget: int) -> int:
    """Add as much of a request to the step as the budget has; returns what is left of it."""
    start = request.computed_upto
    end = min(request.num_tokens, start + budget)
    step.append(Slice(request, start, end))
    return budget - (end - start)
