"""A step that was started: the slices of several requests on the device, and what each of them says when it is done."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from radixkv.forward import Chunk
from radixkv.prediction import Prediction, predict
from radixkv.runner import Runner, StepResult
from radixkv.scheduler import Slice


class Computed(NamedTuple):
    """What became of a slice.

    Attributes:
        part: the slice.
        is_finite: whether K, V and the last hidden states of all its tokens are finite.
        prediction: of the token after it; None if the request has more to compute first.
    """

    part: Slice
    is_finite: bool
    prediction: Prediction | None


class Step:
    """One forward pass, started.

    Args:
        runner: computes it.
        slices: at least one, of requests that hold the blocks for them.
        started_s: when.
    """

    def __init__(self, runner: Runner, slices: Sequence[Slice], started_s: float) -> None:
        self.slices = slices
        self.started_s = started_s
        self._wait = _start(runner, slices)

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return sum(part.end - part.start for part in self.slices)

    def wait(self) -> list[Computed]:
        """Wait for the device.

        Returns:
            What became of each slice, in order.

        Raises:
            Exception: whatever the forward pass raised, also when it was started.

        To be called once.
        """
        step = self._wait()
        del self._wait  # and with it what is on the device, before the next step is started
        last = [part.request for part in self.slices if part.is_last]
        predictions = iter(predict(step.logits, step.most_likely, last))
        return [
            Computed(part, is_finite, next(predictions) if part.is_last else None)
            for part, is_finite in zip(self.slices, step.is_finite, strict=True)
        ]


def _start(runner: Runner, slices: Sequence[Slice]) -> Callable[[], StepResult]:
    """Start a forward pass. What it raises is raised when it is waited for, where everything else is dealt with."""
    try:
        return runner.start([_chunk(part) for part in slices])
    except Exception as error:  # noqa: BLE001 - not lost
        traceback.clear_frames(error.__traceback__)  # they hold the memory that there may have been too little of
        return functools.partial(_raise, error)


def _chunk(part: Slice) -> Chunk:
    request, start, end = part
    lease = request.lease
    assert lease is not None, "a running request holds a lease"
    return Chunk(
        tokens=lease.tokens,
        start=start,
        end=end,
        block_ids=lease.block_ids,
        copy=lease.copy,
        wants_logits=part.is_last,
    )


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error  # else it would hold itself, through its traceback
