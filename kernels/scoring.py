"""The rule by which attention scores keys: scale, sliding window, softcap, sinks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rule by which the queries of one layer score keys, and the keys that they see.

    Attributes:
        scale: factor on the dot products, above 0.
        window: tokens that a query sees, its own included; None for all tokens up to its own.
        softcap: each scaled score `s` becomes `softcap * tanh(s / softcap)`; None for no cap.
        sinks: `[num_query_heads]`, a logit for each query head: it takes part in the sum of weights, by which they are
            divided, and has no value. None for no sinks. Not compared.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
