"""A step: one forward pass over slices of several requests, prepared or started, and its results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from radixkv.api.logprob_table import LogprobRows
from radixkv.cache.lease import Lease
from radixkv.cache.windowed_layers import Cover
from radixkv.compute.forward import Chunk, ChunkState
from radixkv.compute.kept_entries import KeptEntries
from radixkv.compute.runner import Runner, StepResult, Wait
from radixkv.engine.sampler import Allowed, Prediction, allowed_tokens, predict, read_logprob_rows
from radixkv.errors import RadixKVError
from radixkv.invocation import strip_marks
from radixkv.scheduling.request import Request
from radixkv.scheduling.step_plan import Slice


class SliceResult(NamedTuple):
    """The result of one slice.

    Attributes:
        token_slice: the slice.
        is_finite: whether K, V and the last hidden states of its tokens are finite, and the largest logit of each row;
            see `StepResult`.
        prediction: the next token; None if the request has more tokens to compute before it.
        prompt_logprobs: log probabilities of the prompt tokens after each token of the slice; None unless requested.
    """

    token_slice: Slice
    is_finite: bool
    prediction: Prediction | None
    prompt_logprobs: LogprobRows | None = None

    @property
    def refusal(self) -> RadixKVError | None:
        """Why the request can have no next token; None if it can."""
        return None if self.prediction is None else self.prediction.refusal


class Step:
    """One forward pass that was started.

    Args:
        slices: at least one; their requests hold the blocks for them.
        started_s: time of the start.
        start: starts the pass. If it raises, `wait` raises the same exception.

    Attributes:
        slices, started_s: as in the arguments.
    """

    def __init__(self, slices: Sequence[Slice], started_s: float, start: Callable[[], Wait]) -> None:
        self.slices = slices
        self.started_s = started_s
        self._wait = _start_or_keep_error(start)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum([end - start for _, start, end in self.slices])

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that the step computes for requests that decode."""
        return sum(
            [
                request.times.prefilled_s is not None and start + 1 == request.num_tokens
                for request, start, _ in self.slices
            ]
        )

    def wait(self) -> list[SliceResult]:
        """Wait for the device. To be called once.

        Returns:
            The result of each slice, in order.

        Raises:
            Exception: whatever the forward pass raised, when it was started or later.
        """
        are_last = [end == request.num_tokens for request, _, end in self.slices]
        predicted = [each.request for each, is_last in zip(self.slices, are_last, strict=True) if is_last]
        allowed = allowed_tokens(predicted)  # computed while the device is busy
        step = self._wait()
        del self._wait  # frees device memory before the next step is started
        if len(step.logits) > len(predicted):
            return self._results_with_prompt_logprobs(step, are_last, predicted, allowed)
        predictions = iter(predict(step.logits, step.most_likely, predicted, allowed))
        return [
            SliceResult(each, is_finite, next(predictions) if is_last else None)
            for each, is_finite, is_last in zip(self.slices, step.is_finite, are_last, strict=True)
        ]

    def _results_with_prompt_logprobs(
        self, step: StepResult, are_last: Sequence[bool], predicted: Sequence[Request], allowed: Mapping[int, Allowed]
    ) -> list[SliceResult]:
        """Return the results of a step that also computes log probabilities of prompts."""
        row_ends = list(itertools.accumulate(map(_num_logit_rows, self.slices)))
        row_starts = (0, *row_ends)
        rows = [end - 1 for end, is_last in zip(row_ends, are_last, strict=True) if is_last]
        most_likely = [step.most_likely[row] for row in rows]
        predictions = iter(predict(step.logits[rows], most_likely, predicted, allowed))
        return [
            SliceResult(
                each,
                is_finite,
                next(predictions) if is_last else None,
                _prompt_logprobs(each, step.logits[row:]),
            )
            for each, is_finite, is_last, row in zip(self.slices, step.is_finite, are_last, row_starts, strict=False)
        ]


class PreparedStep:
    """The step after the one that is being computed. It computes one more token, still unknown, for each request.

    Args:
        runner: computes both steps.
        step: the step that is being computed. All its requests decode, and hold the blocks for one more token.

    Attributes:
        slices: one token for each request.
    """

    def __init__(self, runner: Runner, step: Step) -> None:
        self.slices = [Slice(each.request, each.end, each.end + 1) for each in step.slices]
        self._launch = runner.prepare([_next_chunk(each) for each in self.slices])

    def start(self, results: Sequence[SliceResult], now_s: float) -> Step:
        """Start this step, given the results of the step before it, none of whose requests has ended."""
        predictions = [result.prediction for result in results]
        token_ids = torch.tensor([prediction.next_token_id for prediction in predictions if prediction is not None])
        assert len(token_ids) == len(self.slices), "every request of the previous step decodes"
        return Step(self.slices, now_s, lambda: self._launch(token_ids))


def start_step(
    runner: Runner, slices: Sequence[Slice], now_s: float, watcher_of: Callable[[Request], KeptEntries | None]
) -> Step:
    """Start a forward pass over at least one slice. `watcher_of` returns the watcher of a request's queries, if any."""

    def start() -> Wait:
        chunks = []
        for token_slice in slices:
            chunk = chunk_of(token_slice)
            if token_slice.request.compression is not None:
                chunk = dataclasses.replace(chunk, watcher=watcher_of(token_slice.request))
            chunks.append(chunk)
        return runner.start(chunks)

    return Step(slices, now_s, start)


def chunk_of(token_slice: Slice) -> Chunk:
    """Return the chunk that computes a slice.

    Pins the parts of windowed layers that it reads or writes, and allocates slots for the states that it saves.
    """
    request, start, end = token_slice
    lease = request.lease
    assert lease is not None, "a running request holds a lease"
    invocation = request.invocation
    block_ids = lease.block_ids
    cover = _cover(lease, start, end)
    return Chunk(
        tokens=lease.tokens if invocation is None else strip_marks(lease.tokens),
        start=start,
        end=end,
        block_ids=block_ids,
        copy=lease.copy,
        part_ids=None if cover is None else cover.part_ids,
        part_copy=None if cover is None else cover.copy,
        wants_logits=end == request.num_tokens,
        wants_all_logits=request.generation is not None and request.wants_all_logits,
        adapter=request.adapter,
        adapter_from=0 if invocation is None else invocation.start,
        num_dropped=lease.num_dropped_tokens,
        state=None if request.state_lease is None else _state_of(token_slice),
    )


def _next_chunk(token_slice: Slice) -> Chunk:
    """Return the chunk of a slice that follows a slice that is being computed.

    The earlier step makes the block copy, and saves the state that this chunk continues from.
    """
    chunk = chunk_of(token_slice)
    state = chunk.state
    if state is not None and token_slice.request.state_lease is not None:
        state = state._replace(source=token_slice.request.state_lease.slot)
    return dataclasses.replace(chunk, copy=None, state=state, wants_logits=True)


def trial_chunk(lease: Lease) -> Chunk:
    """Return a chunk that computes a prompt of one token."""
    cover = _cover(lease, 0, 1)
    part_ids = None if cover is None else cover.part_ids
    return Chunk(bytes(lease.tokens), 0, 1, lease.block_ids, None, wants_logits=True, part_ids=part_ids)


def release_parts(request: Request) -> None:
    """Release the parts of blocks that the next token of a request does not need."""
    lease = request.lease
    if lease is not None:
        for window_lease in lease.windows:
            window_lease.settle(request.computed_upto, lease.copy)


def _cover(lease: Lease, start: int, end: int) -> Cover | None:
    """Pin the parts of blocks that a chunk needs. Returns None if windowed layers have no pool of their own."""
    if not lease.windows:
        return None
    (window_lease,) = lease.windows  # all windowed layers are in one group
    return window_lease.cover(lease.block_ids, start, end, lease.copy)


def _state_of(token_slice: Slice) -> ChunkState:
    """Allocate slots for the states that a slice saves."""
    request, start, end = token_slice
    assert request.state_lease is not None, "the model keeps states"
    keeps = request.params.write_cache and not request.is_revoked
    return ChunkState(request.state_lease.source, request.state_lease.writes(start, end, keeps=keeps))


def _num_logit_rows(token_slice: Slice) -> int:
    return token_slice.end - token_slice.start if token_slice.request.wants_all_logits else int(token_slice.is_last)


def _prompt_logprobs(token_slice: Slice, logits: torch.Tensor) -> LogprobRows | None:
    """Read the log probability of the prompt token after each token of a slice, whose rows come first in `logits`."""
    request, start, end = token_slice
    generation = request.generation
    if generation is None or not request.wants_all_logits:
        return None
    upto = min(end, request.num_prompt_tokens - 1)
    next_tokens = np.frombuffer(request.params.tokens, dtype="<u4")[start + 1 : upto + 1]
    assert generation.sampling.prompt_logprobs is not None, "they were requested"
    return read_logprob_rows(logits[: len(next_tokens)], next_tokens.tolist(), generation.sampling.prompt_logprobs)


def _start_or_keep_error(start: Callable[[], Wait]) -> Wait:
    """Start a pass. If that raises, the returned function raises the same exception."""
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - raised again by `wait`
        traceback.clear_frames(error.__traceback__)  # frees the device memory that the pass had allocated
        return functools.partial(_raise, error)


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error  # breaks the reference cycle through its own traceback
