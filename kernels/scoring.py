"""The rule by which attention scores keys: scale, sliding window, softcap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rule by which the queries of one layer score keys, and the keys that they see.

    Attributes:
        scale: factor on the dot products, above 0.
        window: tokens that a query sees, its own included; None for all tokens up to its own.
        softcap: each scaled score `s` becomes `softcap * tanh(s / softcap)`; None for no cap.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
