"""Reads the next token off the logits, and brings it to the host."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs
from radixkv.api.sampling import Sampling
from radixkv.errors import RadixKVError, RequestError, StepFailed
from radixkv.scheduling.request import Generation, Request

_log = logging.getLogger(__name__)

Allowed = npt.NDArray[np.bool_] | RadixKVError
"""Tokens that may come next, bool `[vocab_size]`; or why there is no answer."""


class Prediction(NamedTuple):
    """The part of an answer that comes from the model.

    Attributes:
        next_token_id: the most likely token, or one that was chosen otherwise.
        logprobs: of the token; empty unless asked for.
        logits: float32 `[vocab_size]`; None unless asked for.
        refusal: why no token may be chosen; None if one was.
    """

    next_token_id: int
    logprobs: Sequence[TokenLogprobs]
    logits: npt.NDArray[np.float32] | None
    refusal: RadixKVError | None = None


def allowed_tokens(requests: Sequence[Request]) -> dict[int, Allowed]:
    """Return which tokens may come next, by the row of each request that has a constraint.

    The first token of a generation starts its matcher.
    """
    return {
        row: _allowed(request)
        for row, request in enumerate(requests)
        if request.generation is not None and request.generation.sampling.constraint is not None
    }


def _allowed(request: Request) -> Allowed:
    generation = request.generation
    assert generation is not None, "only a generation has a constraint"
    assert generation.sampling.constraint is not None, "it is asked for"
    try:
        if generation.matcher is None:
            generation.matcher = generation.sampling.constraint.start(generation.stop_token_ids)
        return generation.matcher.allowed()
    except RequestError as error:
        return error
    except BaseException:  # noqa: BLE001 - a caller's code on the engine's thread; the other requests go on
        _log.exception("a constraint raised")
        return StepFailed("constraint: expected the tokens that may come, and it raised")


def predict(
    logits: torch.Tensor, most_likely: Sequence[int], requests: Sequence[Request], allowed: Mapping[int, Allowed]
) -> list[Prediction]:
    """Choose the next token of each request, and read what else it asks for.

    Waits for the device once for all tokens that are drawn or have other logits, and once for each row that is asked
    for more than a token.

    Args:
        logits: float32 `[len(requests), vocab_size]`.
        most_likely: the token with the largest logit of each row.
        requests: one for each row; says whether to draw a token or to take the most likely one, how many log
            probabilities to report, and whether to report the row itself.
        allowed: for each row with a constraint, the tokens that may come.

    Returns:
        One prediction for each request.
    """
    next_token_ids = list(most_likely)
    chosen = {
        row: _choose(logits[row], request, request.generation, allowed.get(row))
        for row, request in enumerate(requests)
        if request.generation is not None and not request.generation.sampling.takes_most_likely
    }
    if chosen:
        for row, token_id in zip(chosen, torch.stack([*chosen.values()]).tolist(), strict=True):
            next_token_ids[row] = token_id
    return [
        _prediction(logits, row, token_id, request, allowed.get(row))
        for row, (token_id, request) in enumerate(zip(next_token_ids, requests, strict=True))
    ]


def _choose(logits: torch.Tensor, request: Request, generation: Generation, allowed: Allowed | None) -> torch.Tensor:
    """Choose the next token of a generation, int64 `[]`; any token if it is refused one."""
    sampling = generation.sampling
    if isinstance(allowed, RadixKVError):
        return logits.argmax()
    if sampling.changes_logits:
        logits = penalize(
            logits, sampling, _prompt_ids(request, generation), generation.token_ids, generation.stop_token_ids, allowed
        )
    return draw(logits, sampling, position=request.num_tokens) if sampling.temperature > 0 else logits.argmax()


def _prompt_ids(request: Request, generation: Generation) -> npt.NDArray[np.int64]:
    """Return the different tokens of a prompt, which are found once if a penalty asks for them."""
    if generation.sampling.repetition_penalty == 1:
        return np.empty(0, dtype=np.int64)
    if generation.prompt_ids is None:
        generation.prompt_ids = np.unique(np.frombuffer(request.params.tokens, dtype="<u4")).astype(np.int64)
    return generation.prompt_ids


def penalize(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: npt.NDArray[np.int64],
    token_ids: Sequence[int],
    stop_token_ids: Collection[int],
    allowed: npt.NDArray[np.bool_] | None = None,
) -> torch.Tensor:
    """Apply what a generation asks for to its logits: constraint, bias, least length, penalties, in this order.

    Args:
        logits: float32 `[num_logits]`. A model may read more tokens than it writes: ids without a logit change nothing.
        sampling: the options.
        prompt_ids: the different tokens of the prompt; only a repetition penalty reads them.
        token_ids: tokens generated so far.
        stop_token_ids: tokens that would end the generation. If no other token may come, the least length is given up.
        allowed: tokens that may come, bool `[at least num_logits]`; None for all.

    Returns:
        New logits. Tokens that must not come have -inf.
    """
    logits, num_logits = logits.clone(), len(logits)
    stop_ids: list[int] = []
    if len(token_ids) < sampling.min_tokens:
        stop_ids = [token_id for token_id in stop_token_ids if 0 <= token_id < num_logits]

    def on_device(values: npt.ArrayLike, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(logits.device, non_blocking=True)

    if allowed is not None:
        allowed = allowed[:num_logits]
        logits.masked_fill_(~on_device(allowed, torch.bool), -torch.inf)
        if stop_ids and allowed.sum() == allowed[stop_ids].sum():
            stop_ids = []
    elif len(stop_ids) == num_logits:
        stop_ids = []
    if biases := [each for each in sampling.logit_bias if 0 <= each[0] < num_logits]:
        biased, values = zip(*biases, strict=True)
        logits.scatter_add_(0, on_device(biased), on_device(values, torch.float32))
    if stop_ids:
        logits.scatter_(0, on_device(stop_ids), -torch.inf)
    if sampling.repetition_penalty != 1:
        before, factor = logits.clone(), sampling.repetition_penalty
        for ids in (prompt_ids, np.asarray(token_ids, dtype=np.int64)):  # a token of both gets the same score twice
            seen = on_device(ids[ids < num_logits])
            scores = before.gather(0, seen)
            logits.scatter_(0, seen, torch.where(scores > 0, scores / factor, scores * factor))
    if token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        answered, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits.scatter_add_(0, on_device(answered), on_device(-penalties, torch.float32))
    return logits


def _prediction(
    logits: torch.Tensor, row: int, next_token_id: int, request: Request, allowed: Allowed | None
) -> Prediction:
    """Make the prediction of one row. A view of the row is made only if more than a token is asked for."""
    params, generation = request.params, request.generation
    count = (params.top_logprobs or None) if generation is None else generation.sampling.logprobs
    return Prediction(
        next_token_id,
        logprobs=() if count is None else _table(read_logprob_rows(logits[row : row + 1], [next_token_id], count)),
        logits=logits[row].cpu().numpy().copy() if params.return_logits else None,
        refusal=allowed if isinstance(allowed, RadixKVError) else None,
    )


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Draw a token, without waiting for the device.

    Uses the exponential race: each token is the one with the least `exponential / probability` with its own
    probability. The noise depends on the seed and the position alone, and each row is drawn by itself, so that the
    batch changes nothing.

    Args:
        logits: float32 `[vocab_size]`, finite or -inf, and not all -inf.
        sampling: temperature above 0, top_k, top_p, min_p and seed. Each narrows the choice of those before it.
        position: index of the drawn token in its sequence.

    Returns:
        Its id, int64 `[]`, where the logits are.
    """
    scores = (logits - logits.max()).double() / sampling.temperature
    if sampling.top_p < 1 or sampling.top_k:
        ordered, order = scores.sort(descending=True, stable=True)
        if sampling.top_k:
            last = ordered[min(sampling.top_k, len(ordered)) - 1]
            ordered = ordered.masked_fill(ordered < last, -torch.inf)
        if sampling.top_p < 1:
            probabilities = ordered.softmax(dim=0)
            is_out = probabilities.cumsum(dim=0) - probabilities >= sampling.top_p
            ordered = ordered.masked_fill(is_out, -torch.inf)
        scores = scores.scatter(0, order, ordered)
    if sampling.min_p:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -torch.inf)  # the most likely one has 0
    seed = xxh3_64(position.to_bytes(8, "little"), seed=sampling.seed).intdigest()
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return (scores - noise.log()).argmax()


def read_logprob_rows(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> LogprobRows:
    """Read log probabilities of tokens and of the most likely ones in their places. Waits for the device once.

    Args:
        logits: float32 `[num_rows, vocab_size]`.
        token_ids: one for each row. One that has no logit, since a model may read more tokens than it writes, has -inf.
        count: number of most likely tokens; all that have logits, if these are fewer.

    Returns:
        One for each row.
    """
    count = min(count, logits.shape[1])
    rows = _read_rows(logits, token_ids, count).numpy()
    return LogprobRows(rows[:, : 1 + count].astype(np.float32), rows[:, 1 + count :].astype(np.uint32))


def _table(rows: LogprobRows) -> LogprobTable:
    table = LogprobTable(len(rows.logprobs))
    table.put(0, rows)
    return table


def _read_rows(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> torch.Tensor:
    """Return own log probabilities, those of the most likely tokens, and ids: float64 `[num_rows, 1 + 2 count]`."""
    logprobs = logits.log_softmax(dim=-1).double()  # in which ids are exact, too
    values, ids = logprobs.topk(count)
    chosen = torch.tensor(token_ids, dtype=torch.int64).to(logits.device, non_blocking=True)
    own = logprobs.gather(1, chosen.clamp(max=logits.shape[1] - 1)[:, None])
    own = own.masked_fill(chosen[:, None] >= logits.shape[1], -torch.inf)
    return torch.cat((own, values, ids.double()), dim=1).cpu()
