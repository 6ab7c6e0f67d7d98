"""Lifetimes of leaves: counts of after how long each kind is used again, and the plan with the most hits."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Ages fall into half octaves from 2**-20 s to 2**22 s, seven weeks. Whole octaves cost 3 % of the hits.
_AGES_PER_OCTAVE = 2
_SHORTEST_LOG_AGE = -20
_NUM_AGES = 42 * _AGES_PER_OCTAVE
_AGES_S = np.exp2(_SHORTEST_LOG_AGE + np.arange(_NUM_AGES) / _AGES_PER_OCTAVE)  # [num_ages], upper edges
_LIFETIMES_S = np.concatenate(([0.0], _AGES_S))  # [num_lifetimes = 1 + num_ages]
_LEAST_UNUSED = 1e-3  # assumed share of blocks never used again, so that no lifetime is longer than it needs to be


class ReuseCounts:
    """Counts after how many seconds the blocks of each kind were used again.

    Args:
        num_kinds: kinds of leaves.
    """

    def __init__(self, num_kinds: int) -> None:
        self.hits = np.zeros((num_kinds, _NUM_AGES))  # blocks used again, by age
        self.waits = np.zeros((num_kinds, _NUM_AGES))  # block seconds until then
        self.stays = np.zeros(num_kinds)  # blocks that began to wait for their next use
        self.seconds = 0.0

    def hit(self, kind: int, num_blocks: int, age_s: float) -> None:
        """Count blocks that were used again. Complexity: O(1)."""
        index = _age_index(age_s)
        self.hits[kind, index] += num_blocks
        self.waits[kind, index] += num_blocks * age_s

    def forget(self, kept: float) -> None:
        """Multiply everything counted so far by `kept`, a number below 1."""
        self.hits *= kept
        self.waits *= kept
        self.stays *= kept
        self.seconds *= kept

    def plan(self, num_blocks: int) -> tuple[list[tuple[float, float]], float]:
        """Choose the lifetimes with the most hits for which all blocks just fit.

        Args:
            num_blocks: blocks of the cache's pool.

        Returns:
            A short and a long lifetime in seconds for each kind, and the share of nodes that get the long one.

        Complexity: half a millisecond.
        """
        used = self.hits.sum(axis=1)  # [num_kinds]
        num_stays = np.maximum(self.stays, (1 + _LEAST_UNUSED) * used)
        mean_ages_s = self.waits.sum(axis=0) / np.maximum(1e-9, self.hits.sum(axis=0))  # [num_ages]
        lifetimes = _Lifetimes(_smoothed(self.hits, num_blocks), num_stays, mean_ages_s)
        short, long, share = lifetimes.plan(num_blocks * self.seconds)
        return [
            (float(_LIFETIMES_S[low]), float(_LIFETIMES_S[high])) for low, high in zip(short, long, strict=True)
        ], share


class _Lifetimes:
    """The hits and the room of each kind at each lifetime.

    Args:
        hits: `[num_kinds, num_ages]`, blocks used again, by age.
        num_stays: `[num_kinds]`, blocks that waited, whether they were used again or not.
        mean_ages_s: `[num_ages]`, mean wait of the blocks that were used again.
    """

    def __init__(self, hits: Weights, num_stays: Weights, mean_ages_s: Weights) -> None:
        zeros = np.zeros((len(hits), 1))
        self.hits = np.hstack((zeros, hits.cumsum(axis=1)))  # [num_kinds, num_lifetimes]
        waited = np.hstack((zeros, (hits * mean_ages_s).cumsum(axis=1)))
        self.room = waited + (num_stays[:, None] - self.hits) * _LIFETIMES_S  # [num_kinds, num_lifetimes]

    def plan(self, budget: float) -> tuple[Indices, Indices, float]:
        """Find lifetimes that fit the budget, longer ones that do not, and the share of these that fills it."""
        low, high = -60.0, 60.0  # log2 of the price of a block second
        for _ in range(40):
            price = (low + high) / 2
            if self._at(price)[1] > budget:
                low = price
            else:
                high = price
        short, short_room = self._at(high)
        long, long_room = self._at(low)
        excess = long_room - short_room
        share = min(1.0, max(0.0, (budget - short_room) / excess)) if excess > 0 else 0.0
        return short, long, share

    def _at(self, log_price: float) -> tuple[Indices, float]:
        best = np.argmax(self.hits - 2.0**log_price * self.room, axis=1)  # [num_kinds]; the shortest of equals
        return best, float(self.room[np.arange(len(best)), best].sum())


def _smoothed(hits: Weights, weight: float) -> Weights:
    """Draw each kind's ages toward those of all kinds, as if `weight` more blocks had been seen. Sums stay."""
    sums = hits.sum(axis=1, keepdims=True)  # [num_kinds, 1]
    ages = hits.sum(axis=0) / max(1.0, hits.sum())  # [num_ages]
    smoothed: Weights = sums * (hits + weight * ages) / (sums + weight)
    return smoothed


def _age_index(age_s: float) -> int:
    if age_s <= _AGES_S[0]:
        return 0
    return min(_NUM_AGES - 1, math.ceil((math.log2(age_s) - _SHORTEST_LOG_AGE) * _AGES_PER_OCTAVE))
