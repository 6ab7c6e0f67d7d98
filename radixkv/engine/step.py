"""Steps that were started, or prepared: slices of several requests, and what each of them says when it is computed."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner, Wait
from radixkv.engine.sampler import Prediction, predict
from radixkv.scheduling.scheduler import Slice


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
        slices: at least one, of requests that hold the blocks for them.
        started_s: when.
        start: starts it. What it raises is raised when the step is waited for, where everything else is dealt with.
    """

    def __init__(self, slices: Sequence[Slice], started_s: float, start: Callable[[], Wait]) -> None:
        self.slices = slices
        self.started_s = started_s
        self._wait = _started(start)

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


def start_step(runner: Runner, slices: Sequence[Slice], now_s: float) -> Step:
    """Start a forward pass over these slices; there is at least one."""
    return Step(slices, now_s, lambda: runner.start([_chunk(part) for part in slices]))


class NextStep:
    """The next token of each request of a step, prepared while that step is computed and its tokens are not known.

    Args:
        runner: computes both.
        step: one in which all requests decode, and hold the blocks for a token more.
    """

    def __init__(self, runner: Runner, step: Step) -> None:
        self.slices = [Slice(part.request, part.end, part.end + 1) for part in step.slices]
        # If a block is to be copied, the step before does it.
        self._launch = runner.prepare(
            [dataclasses.replace(_chunk(part), copy=None, wants_logits=True) for part in self.slices]
        )

    def start(self, computed: Sequence[Computed], now_s: float) -> Step:
        """Start it, once it is known what became of the step before; no request of that ended."""
        predictions = [each.prediction for each in computed]
        token_ids = torch.tensor([prediction.next_token_id for prediction in predictions if prediction is not None])
        assert len(token_ids) == len(self.slices), "all requests of the step before decode"
        return Step(self.slices, now_s, lambda: self._launch(token_ids))


def _started(start: Callable[[], Wait]) -> Wait:
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - not lost
        traceback.clear_frames(error.__traceback__)  # they hold the memory that there may have been too little of
        return functools.partial(_raise, error)


def _chunk(part: Slice) -> Chunk:
    request, start, end = part
    lease = request.open_lease
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
