"""What the logits say about the next token, as values on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixkv.request import PrefillParams


class Prediction(NamedTuple):
    """The part of an answer that comes from the model; see `PrefillResult`."""

    next_token_id: int
    top_logprobs: tuple[tuple[int, float], ...]
    logits: npt.NDArray[np.float32] | None


def predict(logits: torch.Tensor, wanted: Sequence[PrefillParams]) -> list[Prediction]:
    """Read what was asked for off the logits; waits for the device.

    Args:
        logits: float32 `[len(wanted), vocab_size]`.
        wanted: says for each row how many log probabilities to report, and whether the row itself.
    """
    next_token_ids = logits.argmax(dim=-1).tolist()
    return [
        Prediction(
            next_token_id=next_token_id,
            top_logprobs=_top_logprobs(row, params.top_logprobs),
            logits=row.cpu().numpy().copy() if params.return_logits else None,
        )
        for row, next_token_id, params in zip(logits, next_token_ids, wanted, strict=True)
    ]


def _top_logprobs(logits: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = logits.log_softmax(dim=-1).topk(count)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
