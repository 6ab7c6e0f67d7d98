"""Prepares the next step during the one before, while all that runs decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from radixkv.compute.runner import Runner
from radixkv.engine.early_ends import EarlyEnds
from radixkv.engine.step import Computed, NextStep, Step
from radixkv.errors import CapacityError
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.step_plan import Slice

_log = logging.getLogger(__name__)


class StepsAhead:
    """Prepares steps for a device that computes beside the host, and says when they may be started.

    Args:
        runner: computes steps.
        scheduler, early_ends, held_leases: say what else is due between two steps.
        has_news: whether anything waits to be submitted or called between two steps.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        early_ends: EarlyEnds,
        held_leases: HeldLeases,
        has_news: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._early_ends = early_ends
        self._held_leases = held_leases
        self._has_news = has_news
        self._clock = clock

    def prepare(self, step: Step) -> NextStep | None:
        """Prepare the next token of all requests while a step is computed. Their leases reserve the blocks for it.

        Returns:
            None if the device does not compute beside the host, if anything else is due after the step, if a request
            would have to be paused for its next block, or if the step can't be prepared. Then it is begun as usual.
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
        except Exception:  # noqa: BLE001 - whatever it is, it is no fault of the step that is being computed
            _log.exception("a step of %d requests could not be prepared", len(step.slices))
            return None

    def may_start(self, next_step: NextStep, computed: list[Computed]) -> bool:
        """Whether a prepared step is all there is to do, after the step before it was computed."""
        are_computed = len(computed) == len(next_step.slices) and all(
            each.is_finite and each.refusal is None for each in computed
        )
        go_on = are_computed and all(_decodes_on(each.part.request) for each in computed)
        return go_on and not self._is_anything_else_due(next_step.slices)

    def _is_anything_else_due(self, slices: Sequence[Slice]) -> bool:
        """Whether the engine has more to do than these slices. New requests do not count while all places are taken."""
        now_s, scheduler, expires_s = self._clock(), self._scheduler, self._held_leases.next_expiry_s()
        if scheduler.num_running > len(slices):
            return True
        if not scheduler.is_full and (scheduler.num_waiting or self._has_news()):
            return True
        is_expired = expires_s is not None and expires_s <= now_s
        return is_expired or self._early_ends.is_any_due(now_s)


def _decodes_on(request: Request, num_coming: int = 0) -> bool:
    """Whether a generation decodes, and goes on after `num_coming` more tokens unless one of them is a stop token."""
    generation = request.generation
    if generation is None or not request.is_decoding or generation.finish_reason is not None:
        return False
    if request.compression is not None:  # something is dropped first
        return False
    return len(generation.token_ids) + num_coming < generation.sampling.max_new_tokens
