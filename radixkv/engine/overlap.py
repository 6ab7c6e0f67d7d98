"""Overlap scheduling: prepares the next step on the host while the device computes the current one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from radixkv.compute.runner import Runner
from radixkv.engine.cancellation import Cancellations
from radixkv.engine.step import PreparedStep, SliceResult, Step
from radixkv.errors import CapacityError
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.step_plan import Slice

_log = logging.getLogger(__name__)


class OverlapScheduler:
    """Prepares steps while all running requests decode, and decides whether they may start.

    Used only for a device that computes asynchronously: between a step and a prepared one, the device waits until the
    host knows the next tokens, but not for scheduling or publishing.

    Args:
        runner: computes steps.
        scheduler, cancellations, held_leases: determine which other work is due between two steps.
        has_pending_work: whether new requests, calls or results of tiers wait for the time between two steps.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cancellations: Cancellations,
        held_leases: HeldLeases,
        has_pending_work: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._cancellations = cancellations
        self._held_leases = held_leases
        self._has_pending_work = has_pending_work
        self._clock = clock

    def prepare(self, step: Step) -> PreparedStep | None:
        """Prepare the next token of all requests while `step` is computed. Their leases reserve the blocks for it.

        Returns:
            The prepared step. None if a request does not decode, is compressed, or is known to end with the current
            step, if other work is due after it, if there are no blocks for a request, or if preparing fails. The next
            step is then scheduled as usual.
        """
        if self._is_anything_else_due(step.slices):
            return None
        if not all(_continues_decoding(each.request, num_coming=1) for each in step.slices):
            return None
        try:
            for request, _, end in step.slices:
                request.open_lease.reserve(end + 1)
        except CapacityError:
            return None
        try:
            return PreparedStep(self._runner, step)
        except Exception:  # noqa: BLE001 - the step that is being computed is not affected
            _log.exception("a step of %d requests could not be prepared", len(step.slices))
            return None

    def may_start(self, prepared: PreparedStep, results: Sequence[SliceResult]) -> bool:
        """Whether a prepared step may still be computed next, given the results of the step before it."""
        if len(results) != len(prepared.slices):
            return False
        for result in results:
            request = result.token_slice.request
            if not result.is_finite or result.refusal is not None or not _continues_decoding(request):
                return False
        return not self._is_anything_else_due(prepared.slices)

    def _is_anything_else_due(self, slices: Sequence[Slice]) -> bool:
        """Whether other work than these slices is due.

        While no request could be admitted, neither waiting requests count nor what `has_pending_work` reports.
        """
        scheduler = self._scheduler
        if len(scheduler.running) > len(slices):
            return True
        if not scheduler.is_full and (scheduler.num_waiting or self._has_pending_work()):
            return True
        now_s = self._clock()
        expires_s = self._held_leases.next_expiry_s()
        is_expired = expires_s is not None and expires_s <= now_s
        return is_expired or self._cancellations.is_any_due(now_s)


def _continues_decoding(request: Request, num_coming: int = 0) -> bool:
    """Whether a generation decodes, and continues after `num_coming` more tokens unless one of them is a stop token."""
    generation = request.generation
    if generation is None or not request.is_decoding or generation.finish_reason is not None:
        return False
    if request.compression is not None:  # entries must be dropped before the next token
        return False
    return len(generation.token_ids) + num_coming < generation.sampling.max_new_tokens
