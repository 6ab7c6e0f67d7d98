"""Sampling: chooses the next token of each request of a step from its logits, in one batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from radixkv.api.logprob_table import LogprobRows, LogprobTable
from radixkv.api.result import TokenLogprobs
from radixkv.api.sampling import Sampling
from radixkv.compute.forward import argmax
from radixkv.errors import RadixKVError, RequestError, StepFailed
from radixkv.scheduling.request import Generation, Request

_log = logging.getLogger(__name__)

Allowed = npt.NDArray[np.bool_] | RadixKVError
"""The tokens that a constraint allows next, bool `[vocab_size]`; or why the request fails."""

# Number of rows in each cumulative sum on a GPU, where the order of additions depends on the number of rows.
_CUMSUM_ROWS = 16


class Prediction(NamedTuple):
    """The next token of a request, with the values of the model that its caller requested.

    Attributes:
        next_token_id: the most likely token, or the one that was sampled; arbitrary if there is a refusal.
        logprobs: log probabilities of the token; empty unless requested.
        logits: float32 `[vocab_size]`; None unless requested.
        refusal: why no token may be chosen; None if one was chosen.
    """

    next_token_id: int
    logprobs: Sequence[TokenLogprobs]
    logits: npt.NDArray[np.float32] | None
    refusal: RadixKVError | None = None


class LogitChanges(NamedTuple):
    """The changes that a generation makes to a row of logits.

    Attributes:
        sampling: the bias, the minimum length and the penalties.
        prompt_ids: the distinct tokens of the prompt, int64; empty without a repetition penalty.
        token_ids: tokens generated so far.
        stop_token_ids: tokens that would end the generation. If no other token is allowed, the minimum length is
            ignored.
        allowed: the tokens that the constraint allows, bool `[at least num_logits]`; None for all.
    """

    sampling: Sampling
    prompt_ids: npt.NDArray[np.int64]
    token_ids: Sequence[int]
    stop_token_ids: Collection[int]
    allowed: npt.NDArray[np.bool_] | None = None


def allowed_tokens(requests: Sequence[Request]) -> dict[int, Allowed]:
    """Return the tokens that are allowed next, by the row of each request that has a constraint.

    The first token of a generation starts its matcher.
    """
    return {
        row: _allowed(request.generation)
        for row, request in enumerate(requests)
        if request.generation is not None and request.generation.sampling.constraint is not None
    }


def _allowed(generation: Generation) -> Allowed:
    assert generation.sampling.constraint is not None, "the caller has checked it"
    try:
        if generation.matcher is None:
            generation.matcher = generation.sampling.constraint.start(generation.stop_token_ids)
        return generation.matcher.allowed()
    except RequestError as error:
        return error
    except BaseException:  # noqa: BLE001 - the code of a constraint; the other requests continue
        _log.exception("a constraint raised an exception")
        return StepFailed("constraint: failed to compute the allowed tokens")


def predict(
    logits: torch.Tensor, most_likely: Sequence[int], requests: Sequence[Request], allowed: Mapping[int, Allowed]
) -> list[Prediction]:
    """Choose the next token of each request, and read the log probabilities and logits that its caller requested.

    All rows are processed together, but the result of a row does not depend on the others. One copy from the device
    returns all sampled tokens and log probabilities, and another one all requested rows of logits.

    Args:
        logits: float32 `[len(requests), vocab_size]`.
        most_likely: the token with the largest logit of each row.
        requests: one for each row.
        allowed: for each row with a constraint, the tokens that are allowed.

    Returns:
        One prediction for each request.
    """
    sampled_rows: list[int] = []
    rows_by_count: dict[int, list[int]] = {}  # rows by the number of log probabilities that they request
    logit_rows: list[int] = []
    for row, request in enumerate(requests):
        generation, params = request.generation, request.params
        if generation is None:
            count = params.top_logprobs or None
        else:
            count = generation.sampling.logprobs
            if not generation.sampling.takes_most_likely:
                sampled_rows.append(row)
        if count is not None:
            rows_by_count.setdefault(min(count, logits.shape[1]), []).append(row)
        if params.return_logits:
            logit_rows.append(row)
    token_ids = list(most_likely)
    tables: dict[int, LogprobTable] = {}
    if sampled_rows or rows_by_count:
        token_ids, tables = _sample_and_read(logits, token_ids, requests, allowed, sampled_rows, rows_by_count)
    logits_by_row: dict[int, npt.NDArray[np.float32]] = {}
    if logit_rows:
        for row, values in zip(logit_rows, _select_rows(logits, logit_rows).cpu().numpy(), strict=True):
            logits_by_row[row] = values.copy()
    refusals = {row: error for row, error in allowed.items() if isinstance(error, RadixKVError)}
    return [
        Prediction(token_id, tables.get(row, ()), logits_by_row.get(row), refusals.get(row))
        for row, token_id in enumerate(token_ids)
    ]


def _sample_and_read(
    logits: torch.Tensor,
    token_ids: list[int],
    requests: Sequence[Request],
    allowed: Mapping[int, Allowed],
    sampled_rows: list[int],
    rows_by_count: Mapping[int, list[int]],
) -> tuple[list[int], dict[int, LogprobTable]]:
    """Sample tokens and read log probabilities in one copy from the device, as float64, which holds ids exactly.

    Returns:
        The next token of each row, sampled for `sampled_rows`, and the log probabilities by row.
    """
    pieces: list[torch.Tensor] = []
    sampled_rows, sampled = _sample(logits, requests, allowed, sampled_rows)
    if sampled is not None:
        pieces.append(sampled.double())
    if rows_by_count:
        chosen = _on_device(token_ids, logits.device)
        if sampled is not None:
            chosen = chosen.scatter(0, _on_device(sampled_rows, logits.device), sampled)
        for count, rows in rows_by_count.items():
            pieces.append(_logprobs(_select_rows(logits, rows), _select_rows(chosen, rows), count).flatten())
    values = torch.cat(pieces).cpu().numpy()
    num_sampled = len(sampled_rows)
    for row, token_id in zip(sampled_rows, values[:num_sampled].astype(np.int64).tolist(), strict=True):
        token_ids[row] = token_id
    tables: dict[int, LogprobTable] = {}
    start = num_sampled
    for count, rows in rows_by_count.items():
        num_columns = 1 + 2 * count  # see `_logprobs`
        end = start + len(rows) * num_columns
        all_rows = _logprob_rows(values[start:end].reshape(len(rows), num_columns), count)
        for index, row in enumerate(rows):
            tables[row] = LogprobTable(1)
            one_row = slice(index, index + 1)
            tables[row].put(0, LogprobRows(all_rows.logprobs[one_row], all_rows.token_ids[one_row]))
        start = end
    return token_ids, tables


def _sample(
    logits: torch.Tensor, requests: Sequence[Request], allowed: Mapping[int, Allowed], rows: list[int]
) -> tuple[list[int], torch.Tensor | None]:
    """Choose the next tokens of some rows. A row whose constraint has failed gets an arbitrary token.

    Returns:
        The rows in another order, and their tokens, int64 `[len(rows)]` on the device; None if there are no rows.
    """
    if not rows:
        return rows, None

    def sampling_of(row: int) -> Sampling:
        generation = requests[row].generation
        assert generation is not None, "only generations sample"
        return generation.sampling

    def is_drawn(row: int) -> bool:
        return sampling_of(row).temperature > 0 and not isinstance(allowed.get(row), RadixKVError)

    # Rows that need a sort come first, then others that are drawn, then those that take the most likely token.
    rows = sorted(rows, key=lambda row: (not is_drawn(row), not _needs_sort(sampling_of(row))))
    selected = _select_rows(logits, rows)
    changes: dict[int, LogitChanges] = {}  # by index in `selected`
    for index, row in enumerate(rows):
        changed = _changes(requests[row], allowed.get(row))
        if changed is not None:
            changes[index] = changed
    if len(changes) == len(rows):
        selected = change_logits(selected, [*changes.values()])
    elif changes:
        indices = [*changes]
        changed_rows = change_logits(_select_rows(selected, indices), [*changes.values()])
        selected = selected.index_copy(0, _on_device(indices, logits.device), changed_rows)
    num_drawn = sum(map(is_drawn, rows))
    pieces = []
    if num_drawn:
        drawn = rows[:num_drawn]
        pieces.append(
            draw(selected[:num_drawn], [*map(sampling_of, drawn)], [requests[row].num_tokens for row in drawn])
        )
    if num_drawn < len(rows):
        pieces.append(argmax(selected[num_drawn:]))
    return rows, torch.cat(pieces)


def _changes(request: Request, allowed: Allowed | None) -> LogitChanges | None:
    """Return how a request changes its logits; None if it does not, or if its constraint has failed."""
    generation = request.generation
    assert generation is not None, "only generations sample"
    if isinstance(allowed, RadixKVError) or not generation.sampling.changes_logits:
        return None
    prompt_ids = np.empty(0, dtype=np.int64)
    if generation.sampling.repetition_penalty != 1:
        if generation.prompt_ids is None:  # computed once
            generation.prompt_ids = np.unique(np.frombuffer(request.params.tokens, dtype="<u4")).astype(np.int64)
        prompt_ids = generation.prompt_ids
    return LogitChanges(generation.sampling, prompt_ids, generation.token_ids, generation.stop_token_ids, allowed)


def change_logits(logits: torch.Tensor, changes: Sequence[LogitChanges]) -> torch.Tensor:
    """Apply constraints, biases, minimum lengths and penalties, in this order, without waiting for the device.

    Args:
        logits: float32 `[num_rows, num_logits]`. Ids without a logit are ignored: a model may have more input tokens
            than logits.
        changes: one for each row.

    Returns:
        New logits, with -inf for tokens that must not be sampled.
    """
    num_rows, num_logits = logits.shape
    forbidden = np.zeros((num_rows, num_logits), dtype=np.bool_)
    biases: list[tuple[int, float]] = []  # here and below: by position in the flattened logits
    stops: list[int] = []
    repeated: list[npt.NDArray[np.int64]] = []
    factors: list[npt.NDArray[np.float32]] = []
    present: list[npt.NDArray[np.int64]] = []
    penalties: list[npt.NDArray[Any]] = []
    for row, (sampling, prompt_ids, token_ids, stop_token_ids, allowed) in enumerate(changes):
        offset = row * num_logits
        stop_ids: list[int] = []
        if len(token_ids) < sampling.min_tokens:
            stop_ids = [token_id for token_id in stop_token_ids if 0 <= token_id < num_logits]
        if allowed is not None:
            allowed = allowed[:num_logits]
            forbidden[row] = ~allowed
            if stop_ids and allowed.sum() == allowed[stop_ids].sum():  # nothing but stop tokens is allowed
                stop_ids = []
        elif len(stop_ids) == num_logits:
            stop_ids = []
        biases += [(offset + token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < num_logits]
        stops += [offset + token_id for token_id in stop_ids]
        if sampling.repetition_penalty != 1:
            seen = np.union1d(prompt_ids, np.asarray(token_ids, dtype=np.int64))
            seen = seen[seen < num_logits]
            repeated.append(offset + seen)
            factors.append(np.full(len(seen), sampling.repetition_penalty, dtype=np.float32))
        if token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
            generated, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
            present.append(offset + generated)
            penalties.append(sampling.presence_penalty + sampling.frequency_penalty * counts)

    device = logits.device
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if any(change.allowed is not None for change in changes):
        logits.masked_fill_(_on_device(forbidden, device, torch.bool), -torch.inf)
    if biases:
        positions, values = zip(*biases, strict=True)
        flat.scatter_add_(0, _on_device(positions, device), _on_device(values, device, torch.float32))
    if stops:
        flat.scatter_(0, _on_device(stops, device), -torch.inf)
    if repeated:
        seen_at = _on_device(np.concatenate(repeated), device)
        factor = _on_device(np.concatenate(factors), device, torch.float32)
        scores = flat.gather(0, seen_at)
        flat.scatter_(0, seen_at, torch.where(scores > 0, scores / factor, scores * factor))
    if present:
        amounts = _on_device(-np.concatenate(penalties), device, torch.float32)
        flat.scatter_add_(0, _on_device(np.concatenate(present), device), amounts)
    return logits


def _needs_sort(sampling: Sampling) -> bool:
    """Whether sampling needs tokens sorted by probability, for top_k or top_p."""
    return sampling.top_p < 1 or sampling.top_k > 0


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Draw a token from each row, without waiting for the device.

    Uses the exponential race (Gumbel-max trick): the token with the smallest `exponential / probability` is distributed
    by these probabilities. The noise of a row depends only on its seed and position, so the batch changes nothing.

    Args:
        logits: float32 `[num_rows, vocab_size]`, finite or -inf, and no row all -inf.
        samplings: for each row a temperature above 0, top_k, top_p, min_p, applied in this order, and seed. Rows with
            top_k or top_p come first.
        positions: index of each drawn token in its sequence.

    Returns:
        Token ids, int64 `[num_rows]`, on the device of the logits.
    """
    device = logits.device
    temperatures = _column([sampling.temperature for sampling in samplings], device)
    scores = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperatures
    num_sorted = sum(map(_needs_sort, samplings))
    assert all(map(_needs_sort, samplings[:num_sorted])), "rows that need a sort come first"
    if num_sorted:
        narrowed = _narrow(scores[:num_sorted], samplings[:num_sorted])
        scores = narrowed if num_sorted == len(samplings) else torch.cat((narrowed, scores[num_sorted:]))
    if any(sampling.min_p for sampling in samplings):
        # The most likely token has the score 0.
        min_scores = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings]
        scores = scores.masked_fill(scores < _column(min_scores, device), -torch.inf)
    noise = torch.empty_like(scores)
    for row, sampling, position in zip(noise, samplings, positions, strict=True):
        seed = xxh3_64(position.to_bytes(8, "little"), seed=sampling.seed).intdigest()
        row.exponential_(generator=torch.Generator(device).manual_seed(seed))
    return argmax(scores - noise.log_())


def _narrow(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Apply top_k and top_p to rows of scores, float64."""
    device, num_logits = scores.device, scores.shape[1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    if any(sampling.top_k for sampling in samplings):
        last_ranks = [min(sampling.top_k or num_logits, num_logits) - 1 for sampling in samplings]
        min_scores = ordered.gather(1, _on_device(last_ranks, device)[:, None])
        ordered = ordered.masked_fill(ordered < min_scores, -torch.inf)
    if any(sampling.top_p < 1 for sampling in samplings):
        probabilities = ordered.softmax(dim=-1)
        top_p = [sampling.top_p if sampling.top_p < 1 else math.inf for sampling in samplings]
        # A token stays if the tokens before it have less than `top_p` together.
        is_excluded = _cumsum(probabilities) - probabilities >= _column(top_p, device)
        ordered = ordered.masked_fill(is_excluded, -torch.inf)
    return scores.scatter(1, order, ordered)


def _cumsum(rows: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of rows, bitwise identical for any batch of rows.

    On a GPU the algorithm depends on the number of rows, and the algorithm for a single row is not deterministic. So
    rows are processed in groups of a fixed size.
    """
    if rows.device.type == "cpu":
        return rows.cumsum(dim=-1)
    num_rows = len(rows)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -num_rows % _CUMSUM_ROWS))
    groups = [padded[start : start + _CUMSUM_ROWS] for start in range(0, num_rows, _CUMSUM_ROWS)]
    return torch.cat([group.cumsum(dim=-1) for group in groups])[:num_rows]


def read_logprob_rows(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> LogprobRows:
    """Read log probabilities of tokens and of the most likely ones at their positions. Waits for the device once.

    Args:
        logits: float32 `[num_rows, vocab_size]`.
        token_ids: one for each row. A token without a logit has -inf: a model may have more input tokens than logits.
        count: number of most likely tokens; all tokens that have logits if there are fewer.

    Returns:
        One row of log probabilities for each row of logits.
    """
    count = min(count, logits.shape[1])
    return _logprob_rows(_logprobs(logits, _on_device(token_ids, logits.device), count).cpu().numpy(), count)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return log probabilities of tokens and of the `count` most likely ones, and the ids of the latter.

    Returns:
        float64 `[num_rows, 1 + 2 * count]`.
    """
    num_logits = logits.shape[1]
    logprobs = logits.log_softmax(dim=-1).double()
    values, ids = logprobs.topk(count)
    own = logprobs.gather(1, token_ids.clamp(max=num_logits - 1)[:, None])
    own = own.masked_fill(token_ids[:, None] >= num_logits, -torch.inf)
    return torch.cat((own, values, ids.double()), dim=1)


def _logprob_rows(values: npt.NDArray[np.float64], count: int) -> LogprobRows:
    return LogprobRows(values[:, : 1 + count].astype(np.float32), values[:, 1 + count :].astype(np.uint32))


def _select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of a tensor; the tensor itself if these are all its rows in order."""
    if len(rows) == len(tensor) and all(row == index for index, row in enumerate(rows)):
        return tensor
    return tensor.index_select(0, _on_device(rows, tensor.device))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return one value for each row, float64 `[num_rows, 1]`."""
    return _on_device(values, device, torch.float64)[:, None]


def _on_device(values: npt.ArrayLike, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype).to(device, non_blocking=True)
