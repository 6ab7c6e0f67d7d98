"""A step: one forward pass over slices of several requests, started or prepared, and its outcome."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from radixkv.api.logprob_table import LogprobRows
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.prompt_lease import PromptLease
from radixkv.cache.windowed_layers import Cover
from radixkv.compute.compression.kept_entries import KeptEntries
from radixkv.compute.forward import Chunk, ChunkState
from radixkv.compute.runner import Runner, Wait
from radixkv.engine.sampler import Prediction, allowed_tokens, predict, read_logprob_rows
from radixkv.errors import RadixKVError
from radixkv.invocation import plain
from radixkv.scheduling.request import Request
from radixkv.scheduling.step_plan import Slice


class Computed(NamedTuple):
    """The outcome of one slice.

    Attributes:
        part: the slice.
        is_finite: whether K, V, the last hidden states and the logits of its tokens are finite; see `StepResult`.
        prediction: the next token; None if the request has more tokens to compute before it.
        prompt_logprobs: of the tokens of the prompt after each one of the slice; None unless asked for.
    """

    part: Slice
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
        start: starts the pass. What it raises is raised by `wait`, where all errors are handled.

    Attributes:
        slices, started_s: as in the arguments.
    """

    def __init__(self, slices: Sequence[Slice], started_s: float, start: Callable[[], Wait]) -> None:
        self.slices = slices
        self.started_s = started_s
        self._wait = _started(start)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.end - part.start for part in self.slices)

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that follow one of an answer."""
        return sum(part.request.is_decoding for part in self.slices)

    def wait(self) -> list[Computed]:
        """Wait for the device. To be called once.

        Returns:
            The outcome of each slice, in order.

        Raises:
            Exception: whatever the forward pass raised, at its start or later.
        """
        last = [part.request for part in self.slices if part.is_last]
        allowed = allowed_tokens(last)  # the device computes meanwhile
        step = self._wait()
        del self._wait  # frees memory of the device before the next step is started
        logits, most_likely = step.logits, step.most_likely
        prompts: list[LogprobRows | None] = [None] * len(self.slices)
        if len(logits) > len(last):  # somebody wants to know how likely its prompt is
            ends = list(itertools.accumulate(map(_num_logit_rows, self.slices)))
            starts = (0, *ends)
            prompts = [_of_prompt(part, logits[row:]) for part, row in zip(self.slices, starts, strict=False)]
            rows = [end - 1 for part, end in zip(self.slices, ends, strict=True) if part.is_last]
            logits, most_likely = logits[rows], [most_likely[row] for row in rows]
        predictions = iter(predict(logits, most_likely, last, allowed))
        return [
            Computed(part, is_finite, next(predictions) if part.is_last else None, prompt)
            for part, is_finite, prompt in zip(self.slices, step.is_finite, prompts, strict=True)
        ]


def start_step(
    runner: Runner, slices: Sequence[Slice], now_s: float, watcher_of: Callable[[Request], KeptEntries | None]
) -> Step:
    """Start a forward pass over at least one slice, given who looks at the queries of a request; None for nobody."""
    return Step(
        slices, now_s, lambda: runner.start([_watched(chunk_of(part), watcher_of(part.request)) for part in slices])
    )


class NextStep:
    """One more token for each request of a step, prepared while that step is computed and its tokens are not known.

    Args:
        runner: computes both steps.
        step: the step before; all its requests decode, and hold the blocks for one more token.

    Attributes:
        slices: one token for each request.
    """

    def __init__(self, runner: Runner, step: Step) -> None:
        self.slices = [Slice(part.request, part.end, part.end + 1) for part in step.slices]
        self._launch = runner.prepare([_next_chunk(part) for part in self.slices])

    def start(self, computed: Sequence[Computed], now_s: float) -> Step:
        """Start the prepared step after the step before was computed. All its requests go on."""
        predictions = [each.prediction for each in computed]
        token_ids = torch.tensor([prediction.next_token_id for prediction in predictions if prediction is not None])
        assert len(token_ids) == len(self.slices), "every request of the step before decodes"
        return Step(self.slices, now_s, lambda: self._launch(token_ids))


def _started(start: Callable[[], Wait]) -> Wait:
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - raised again by `wait`
        traceback.clear_frames(error.__traceback__)  # frees the device memory that the pass had allocated
        return functools.partial(_raise, error)


def chunk_of(part: Slice) -> Chunk:
    """Return what is to be computed for a slice, for which its request keeps the parts of blocks."""
    request, start, end = part
    lease, invocation = request.open_lease, request.invocation
    block_ids, copy = lease.block_ids, lease.copy
    cover = _cover(lease, block_ids, start, end, copy)
    return Chunk(
        tokens=lease.tokens if invocation is None else plain(lease.tokens),
        start=start,
        end=end,
        block_ids=block_ids,
        copy=copy,
        part_ids=cover.part_ids,
        part_copy=cover.copy,
        wants_logits=part.is_last,
        wants_all_logits=request.wants_all_logits,
        adapter=request.adapter,
        adapter_from=0 if invocation is None else invocation.start,
        num_dropped=lease.num_dropped_tokens,
        state=_state_of(part),
    )


def _next_chunk(part: Slice) -> Chunk:
    """Return the chunk of a slice that follows a step under way, which copies its block and leaves its state."""
    chunk, own = chunk_of(part), part.request.state
    state = None if chunk.state is None or own is None else chunk.state._replace(source=own.slot)
    return dataclasses.replace(chunk, copy=None, state=state, wants_logits=True)


def trial_chunk(lease: PromptLease) -> Chunk:
    """Return a chunk that computes a prompt of one token."""
    cover = _cover(lease, lease.block_ids, 0, 1, None)
    return Chunk(bytes(lease.tokens), 0, 1, lease.block_ids, None, wants_logits=True, part_ids=cover.part_ids)


def settle(request: Request) -> None:
    """Let go of the parts of blocks that the next token of a request does not need."""
    if request.lease is not None:
        for holder in request.lease.own.parts:
            holder.settle(request.computed_upto, request.lease.copy)


class _NoCover(NamedTuple):
    part_ids: BlockIds | None = None
    copy: BlockCopy | None = None


def _cover(lease: PromptLease, block_ids: BlockIds, start: int, end: int, copy: BlockCopy | None) -> Cover | _NoCover:
    """Keep the parts that a chunk needs, if windowed layers have a pool of their own."""
    holder = next(iter(lease.own.parts), None)
    return _NoCover() if holder is None else holder.cover(block_ids, start, end, copy)


def _state_of(part: Slice) -> ChunkState | None:
    """Take slots for the states that a slice leaves; None for a model without states."""
    request, start, end = part
    if request.state is None:
        return None
    keeps = request.params.write_cache and not request.is_revoked
    return ChunkState(request.state.source, request.state.writes(start, end, keeps=keeps))


def _watched(chunk: Chunk, watcher: KeptEntries | None) -> Chunk:
    return chunk if watcher is None else dataclasses.replace(chunk, watcher=watcher)


def _num_logit_rows(part: Slice) -> int:
    return part.end - part.start if part.request.wants_all_logits else int(part.is_last)


def _of_prompt(part: Slice, logits: torch.Tensor) -> LogprobRows | None:
    """Read the log probabilities of the prompt's tokens after those of a slice, whose rows come first in `logits`."""
    request, start, end = part
    generation = request.generation
    if generation is None or not request.wants_all_logits:
        return None
    upto = min(end, request.num_prompt_tokens - 1)
    following = np.frombuffer(request.params.tokens, dtype="<u4")[start + 1 : upto + 1]
    assert generation.sampling.prompt_logprobs is not None, "it wants them"
    return read_logprob_rows(logits[: len(following)], following.tolist(), generation.sampling.prompt_logprobs)


def _raise(error: Exception) -> NoReturn:
    try:
        raise error
    finally:
        del error  # breaks the reference cycle through its own traceback
