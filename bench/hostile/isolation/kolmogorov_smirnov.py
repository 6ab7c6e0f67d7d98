"""The two-sample Kolmogorov-Smirnov test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_NUM_TERMS = 100


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the probability that two samples of one distribution differ as much as these (asymptotic formula).

    The formula is good from about 30 values in each sample on.

    Source: Press et al., Numerical Recipes, 14.3.
    """
    ordered = [np.sort(np.asarray(sample, dtype=np.float64)) for sample in (first, second)]
    all_values = np.concatenate(ordered)
    cumulative_shares = [np.searchsorted(sample, all_values, side="right") / len(sample) for sample in ordered]
    distance = float(np.abs(cumulative_shares[0] - cumulative_shares[1]).max())
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series converges too slowly here, and its value is 1 to ten digits
    terms = (2.0 * (-1.0) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, _NUM_TERMS + 1))
    return float(min(1.0, max(0.0, math.fsum(terms))))
