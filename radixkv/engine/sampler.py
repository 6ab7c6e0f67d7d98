"""Reads the next token off the logits, and brings it to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from radixkv.api.sampling import Sampling
from radixkv.scheduling.request import Request


class Prediction(NamedTuple):
    """The part of an answer that comes from the model.

    Attributes:
        next_token_id: the most likely token, or one that was drawn.
        top_logprobs: `(token_id, logprob)`, most likely first.
        logits: float32 `[vocab_size]`; None unless asked for.
    """

    next_token_id: int
    top_logprobs: tuple[tuple[int, float], ...]
    logits: npt.NDArray[np.float32] | None


def predict(logits: torch.Tensor, most_likely: Sequence[int], requests: Sequence[Request]) -> list[Prediction]:
    """Choose the next token of each request, and read what else it asks for.

    Waits for the device once for all tokens that are drawn, and once for each row that is asked for more than a token.

    Args:
        logits: float32 `[len(requests), vocab_size]`.
        most_likely: the token with the largest logit of each row.
        requests: one for each row; says whether to draw a token or to take the most likely one, how many log
            probabilities to report, and whether to report the row itself.

    Returns:
        One prediction for each request.
    """
    next_token_ids = list(most_likely)
    drawn = {
        row: draw(logits[row], request.generation.sampling, position=request.num_tokens)
        for row, request in enumerate(requests)
        if request.generation is not None and request.generation.sampling.temperature > 0
    }
    if drawn:
        for row, token_id in zip(drawn, torch.stack([*drawn.values()]).tolist(), strict=True):
            next_token_ids[row] = token_id
    return [
        _prediction(logits, row, token_id, request)
        for row, (token_id, request) in enumerate(zip(next_token_ids, requests, strict=True))
    ]


def _prediction(logits: torch.Tensor, row: int, next_token_id: int, request: Request) -> Prediction:
    """Make the prediction of one row. A view of the row is made only if more than a token is asked for."""
    params = request.params
    return Prediction(
        next_token_id,
        top_logprobs=_top_logprobs(logits[row], params.top_logprobs) if params.top_logprobs else (),
        logits=logits[row].cpu().numpy().copy() if params.return_logits else None,
    )


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Draw a token, without waiting for the device.

    Uses the exponential race: each token is the one with the least `exponential / probability` with its own
    probability. The noise depends on the seed and the position alone, and each row is drawn by itself, so that the
    batch changes nothing.

    Args:
        logits: float32 `[vocab_size]`, all finite.
        sampling: temperature above 0, top_p and seed.
        position: index of the drawn token in its sequence.

    Returns:
        Its id, int64 `[]`, where the logits are.
    """
    scores = (logits - logits.max()).double() / sampling.temperature
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(dim=0)
        is_out = probabilities.cumsum(dim=0) - probabilities >= sampling.top_p
        scores = scores.scatter(0, order, ordered.masked_fill(is_out, -torch.inf))
    seed = xxh3_64(position.to_bytes(8, "little"), seed=sampling.seed).intdigest()
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return (scores - noise.log()).argmax()


def _top_logprobs(logits: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, ids = logits.log_softmax(dim=-1).topk(count)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
