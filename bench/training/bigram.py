"""A bigram model of tokens, which counts how often each token has followed another one."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise


class Bigram:
    """Pair counts, interpolated (Witten-Bell) with single-token counts, and these with a uniform distribution.

    Args:
        vocab_size: number of different tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._num_pairs: Counter[int] = Counter()  # by the first token of the pair
        self._num_successors: Counter[int] = Counter()  # number of different tokens that have followed a token
        self._singles: Counter[int] = Counter()
        self._num_singles = 0

    def copy(self) -> Bigram:
        """Return a copy with the same counts."""
        return copy.deepcopy(self)

    def learn(self, ids: Sequence[int]) -> None:
        """Count the pairs of a text. Must be called before anything else is counted. Complexity: O(tokens), in C."""
        assert not self._pairs
        self._pairs.update(pairwise(ids))
        self._num_pairs.update(ids[:-1])
        self._num_successors.update(previous for previous, _ in self._pairs)
        self._singles.update(ids[1:])
        self._num_singles = max(0, len(ids) - 1)

    def bits(self, ids: Sequence[int]) -> float:
        """Return the bits that encode a text without its first token. Counts each token after predicting it."""
        total = 0.0
        for previous, token in pairwise(ids):
            total -= math.log2(self.probability(previous, token))
            self._count(previous, token)
        return total

    def probability(self, previous: int, token: int) -> float:
        """Return the probability of a token after another one, never zero."""
        single = self._interpolate(self._singles[token], self._num_singles, len(self._singles), 1 / self._vocab_size)
        return self._interpolate(
            self._pairs[previous, token], self._num_pairs[previous], self._num_successors[previous], single
        )

    @staticmethod
    def _interpolate(count: int, total: int, num_kinds: int, fallback: float) -> float:
        """Return a Witten-Bell probability.

        Args:
            count: how often the event was counted.
            total: sum of the counts of all events.
            num_kinds: number of different events that were counted.
            fallback: probability of the event in the next simpler model.
        """
        return (count + num_kinds * fallback) / (total + num_kinds) if total else fallback

    def _count(self, previous: int, token: int) -> None:
        self._num_successors[previous] += (previous, token) not in self._pairs
        self._pairs[previous, token] += 1
        self._num_pairs[previous] += 1
        self._singles[token] += 1
        self._num_singles += 1
