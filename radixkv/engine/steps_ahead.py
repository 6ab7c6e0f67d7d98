"""Looks a step ahead: while all that runs decodes, the next step is prepared during the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from radixkv.compute.runner import Runner
from radixkv.engine.early_ends import Departures
from radixkv.engine.step import Computed, NextStep, Step
from radixkv.errors import CapacityError
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler, Slice

_log = logging.getLogger(__name__)


class Lookahead:
    """Prepares steps for a device that computes while the host does something else, and says when they may be started.

    Args:
        runner: computes steps.
        scheduler, departures, held_leases: of the same engine.
        has_news: whether anything waits to be submitted or called between two steps.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        departures: Departures,
        held_leases: HeldLeases,
        has_news: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._departures = departures
        self._held_leases = held_leases
        self._has_news = has_news
        self._clock = clock

    def prepare(self, step: Step) -> NextStep | None:
        """Prepare the next token of all requests while a step is computed; their leases reserve the blocks for it.

        Returns:
            None if the device does not compute meanwhile, if more is to be done after that step, if there are no blocks
            for the next one without a pause, or if it can't be prepared: then it is made as any other.
        """
        if not self._runner.is_asynchronous or self._is_anything_else_due(step.slices):
            return None
        if not all(_decodes_on(part.request, num_coming=1) for part in step.slices):
            return None
        try:
            for request, _, end in step.slices:
                request.open_lease.reserve(end + 1)
        except CapacityError:
            return None
        try:
            return NextStep(self._runner, step)
        except Exception:  # noqa: BLE001 - whatever it is, the step that is being computed has nothing to do with it
            _log.exception("a step of %d requests could not be prepared", len(step.slices))
            return None

    def may_start(self, next_step: NextStep, computed: list[Computed]) -> bool:
        """Whether what was prepared is all that there is to do, once it is known what became of the step before."""
        are_computed = len(computed) == len(next_step.slices) and all(each.is_finite for each in computed)
        go_on = are_computed and all(_decodes_on(each.part.request) for each in computed)
        return go_on and not self._is_anything_else_due(next_step.slices)

    def _is_anything_else_due(self, slices: Sequence[Slice]) -> bool:
        """Whether more than these has to be dealt with between two steps; while all places are taken, nobody new."""
        now_s, scheduler, expires_s = self._clock(), self._scheduler, self._held_leases.next_expiry_s()
        if scheduler.num_running > len(slices):
            return True
        if not scheduler.is_full and (scheduler.num_waiting or self._has_news()):
            return True
        is_expired = expires_s is not None and expires_s <= now_s
        return is_expired or self._departures.is_any_due(now_s)


def _decodes_on(request: Request, num_coming: int = 0) -> bool:
    """Whether a generation that decodes goes on with so many tokens more than it has, unless they end it."""
    generation = request.generation
    if generation is None or not request.is_decoding or generation.finish_reason is not None:
        return False
    return len(generation.token_ids) + num_coming < generation.sampling.max_new_tokens
