"""How attention turns queries and keys into scores, and which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one layer asks of attention.

    Attributes:
        scale: factor on the dot products, above 0.
        window: tokens that a query sees, its own included; None for all tokens up to its own.
        softcap: each scaled score `s` becomes `softcap * tanh(s / softcap)`; None for no cap.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
