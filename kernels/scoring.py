"""The rule by which attention scores keys: scale, sliding window, softcap, sinks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the queries of one layer score keys, and which keys they attend to.

    Attributes:
        scale: factor on the dot products, above 0.
        window: number of tokens that a query attends to, including its own; None for all tokens up to its own.
        softcap: each scaled score `s` becomes `softcap * tanh(s / softcap)`; None for no cap.
        sinks: attention sinks, `[num_query_heads]`: one logit per query head that is added to the denominator of the
            softmax and has no value vector. None for no sinks. Ignored by `==`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
