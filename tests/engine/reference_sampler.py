"""A sampler of one row at a time, independent of the batched sampler, which must agree with it bit for bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from radixkv.api.sampling import Sampling


def penalize(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt_ids: npt.NDArray[np.int64],
    token_ids: Sequence[int],
    stop_token_ids: Collection[int],
    allowed: npt.NDArray[np.bool_] | None = None,
) -> torch.Tensor:
    """Apply the constraint, the biases, the minimum length and the penalties of a generation, in this order.

    Args:
        logits: float32 `[num_logits]`. Ids without a logit are ignored: a model may have more input tokens than logits.
        sampling: the options.
        prompt_ids: the distinct tokens of the prompt; only a repetition penalty uses them.
        token_ids: tokens generated so far.
        stop_token_ids: tokens that would end the generation. If no other token is allowed, the minimum length is
            ignored.
        allowed: the tokens that the constraint allows, bool `[at least num_logits]`; None for all.

    Returns:
        New logits, with -inf for tokens that must not be sampled.
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
        # A token of both is penalized once, since both scores are computed from the logits before.
        for ids in (prompt_ids, np.asarray(token_ids, dtype=np.int64)):
            seen = on_device(ids[ids < num_logits])
            scores = before.gather(0, seen)
            logits.scatter_(0, seen, torch.where(scores > 0, scores / factor, scores * factor))
    if token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        generated_ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits.scatter_add_(0, on_device(generated_ids), on_device(-penalties, torch.float32))
    return logits


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    """Draw a token, without waiting for the device.

    Uses the exponential race: the token with the smallest `exponential / probability` is distributed by these
    probabilities. The noise depends only on the seed and the position.

    Args:
        logits: float32 `[vocab_size]`, finite or -inf, and not all -inf.
        sampling: temperature above 0, top_k, top_p, min_p, applied in this order, and seed.
        position: index of the drawn token in its sequence.

    Returns:
        The token id, int64 `[]`, on the device of the logits.
    """
    scores = (logits - logits.max()).double() / sampling.temperature
    if sampling.top_p < 1 or sampling.top_k:
        ordered, order = scores.sort(descending=True, stable=True)
        if sampling.top_k:
            kth_score = ordered[min(sampling.top_k, len(ordered)) - 1]
            ordered = ordered.masked_fill(ordered < kth_score, -torch.inf)
        if sampling.top_p < 1:
            probabilities = ordered.softmax(dim=0)
            is_outside = probabilities.cumsum(dim=0) - probabilities >= sampling.top_p
            ordered = ordered.masked_fill(is_outside, -torch.inf)
        scores = scores.scatter(0, order, ordered)
    if sampling.min_p:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -torch.inf)  # the most likely token has score 0
    seed = xxh3_64(position.to_bytes(8, "little"), seed=sampling.seed).intdigest()
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return (scores - noise.log()).argmax()


def logprobs_of(logits: torch.Tensor, token_id: int, count: int) -> tuple[list[float], list[int]]:
    """Return the log probabilities of a token and of the `count` most likely ones, as float32, and the ids of these."""
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.double().topk(count)
    return [float(logprobs[token_id]), *values.float().tolist()], ids.tolist()
