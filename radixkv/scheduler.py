"""Which tokens are computed in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

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


class Scheduler:
    """First come, first served, under a token budget a step.

    A request is admitted at the last moment: when the step has tokens left that no running request needs. So it
    matches the cache after everything before it was published, and a cold prefix that many requests share is computed
    by the first of them.

    Args:
        max_step_tokens: tokens a step.
        max_running_requests: requests that may be admitted at the same time.
    """

    def __init__(self, max_step_tokens: int, max_running_requests: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_step_tokens = max_step_tokens
        self._max_running_requests = max_running_requests

    def next_step(self, admit: Callable[[Request], bool]) -> list[Slice]:
        """Choose the next step's slices: running requests first, then new ones while the budget lasts.

        Args:
            admit: gives a request its blocks and sets `computed_upto`; False if it has to wait for blocks.
        """
        budget = self._max_step_tokens
        step: list[Slice] = []
        for request in self.running:
            if budget:
                step.append(_slice(request, budget))
                budget -= step[-1].end - step[-1].start
        while budget and self.waiting and len(self.running) < self._max_running_requests and admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            step.append(_slice(request, budget))
            budget -= step[-1].end - step[-1].start
        return step

    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return [*self.running, *self.waiting]

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)


def _slice(request: Request, budget: int) -> Slice:
    return Slice(request, request.computed_upto, min(request.num_tokens, request.computed_upto + budget))
