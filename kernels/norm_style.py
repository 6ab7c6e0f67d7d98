"""Names the ways in which RMS norms apply their weight."""

from __future__ import annotations

from typing import NamedTuple


class NormStyle(NamedTuple):
    """How a normalized float32 row is multiplied by the weight and rounded to the row's dtype.

    Attributes:
        weight_offset: added to the weight, in float32, before it is applied.
        rounds_first: whether the row is rounded to its dtype before the weight is applied, in addition to after it.
    """

    weight_offset: float
    rounds_first: bool


TORCH = NormStyle(0.0, rounds_first=False)
LLAMA = NormStyle(0.0, rounds_first=True)
GEMMA = NormStyle(1.0, rounds_first=False)
