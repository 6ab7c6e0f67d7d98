"""Which tokens are computed in the next step."""

from __future__ import annotations

import enum
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
    ENDED = "it was refused"
    NO_ROOM = "it waits for blocks, and nobody behind it may have them"


class Scheduler:
    """First come, first served, under a token budget a step.

    A request is admitted at the last moment: when the step has tokens left that no running request needs. So it
    matches the cache after everything before it was published.

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

    def next_step(self, admit: Callable[[Request], Admission]) -> list[Slice]:
        """Choose the next step's slices: running requests first, then new ones while the budget lasts.

        Args:
            admit: tries to give a request its blocks, and sets `computed_upto`.
        """
        budget = self._max_step_tokens
        step: list[Slice] = []
        for request in self.running:
            if budget:
                step.append(_slice(request, budget))
                budget -= step[-1].end - step[-1].start
        while budget and self.waiting and len(self.running) < self._max_running_requests:
            request = self.waiting[0]
            admission = admit(request)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.ENDED:
                continue
            self.waiting.remove(request)
            if admission is Admission.FOLLOWS:
                self.following.add(request)
                continue
            self.running.append(request)
            step.append(_slice(request, budget))
            budget -= step[-1].end - step[-1].start
        return step

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


def _slice(request: Request, budget: int) -> Slice:
    return Slice(request, request.computed_upto, min(request.num_tokens, request.computed_upto + budget))
