"""Decides whether stored blocks are loaded, or computed again because that is faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_FIRST_BUCKET_TOKENS = 512
_FORGET = 0.1  # part of what is known that a load, or a step of that many tokens, replaces
_DOUBT = 0.02  # part of a store's times that is forgotten each time it is left out


class LoadDecision(NamedTuple):
    """The part of a run of stored blocks that is to be loaded.

    Attributes:
        num_blocks: blocks at its start.
        load_s, compute_s: estimated seconds to load these, and to compute them instead; None if nothing was measured.
    """

    num_blocks: int
    load_s: float | None
    compute_s: float | None


class LoadOrCompute:
    """Compares measured times of loads with measured times of steps.

    A token takes longer the more tokens come before it, so steps are measured by position, in buckets that double in
    length. While nothing was measured for either, loading is supposed to be faster.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_s: dict[int, float] = {}  # seconds a token, by bucket
        self._loads: dict[str, _Line] = {}  # seconds by blocks, of each store
        self._answers_s: dict[str, float] = {}  # seconds until each shared store says what it has
        self._num_queued_blocks: dict[str, int] = {}
        self._fills = _Line()  # seconds by blocks, from memory that a store lent into the pool

    def note_step(self, seconds: float, parts: Sequence[tuple[int, int]]) -> None:
        """Learn from a step that computed these ranges `[start, end)` of requests; nothing of single tokens.

        A step that decodes takes much longer for a token than one that computes a prompt.
        """
        token_s = seconds / sum(end - start for start, end in parts)
        for start, end in parts:
            if end - start > 1:
                bucket, weight = _bucket(start), (1 - _FORGET) ** ((end - start) / _FIRST_BUCKET_TOKENS)
                self._token_s[bucket] = token_s + weight * (self._token_s.get(bucket, token_s) - token_s)

    def note_start(self, store: str, num_blocks: int) -> None:
        """Note that a load was given to a store."""
        self._num_queued_blocks[store] = self._num_queued_blocks.get(store, 0) + num_blocks

    def note_end(self, store: str, num_blocks: int, seconds: float | None) -> None:
        """Note that a load ended, after these seconds; None if it failed, and says nothing about the time of others."""
        self._num_queued_blocks[store] -= num_blocks
        if seconds is not None:
            self._loads.setdefault(store, _Line()).learn(num_blocks, seconds)

    def note_fill(self, num_blocks: int, seconds: float) -> None:
        """Note how long it took to copy loaded blocks into the pool: on a GPU, until the copy was complete."""
        self._fills.learn(num_blocks, seconds)

    def note_answer(self, store: str, seconds: float) -> None:
        """Note that a shared store said what it has."""
        known_s = self._answers_s.setdefault(store, seconds)
        self._answers_s[store] = known_s + _FORGET * (seconds - known_s)

    def is_worth_asking(self, store: str, start_token: int, num_tokens: int) -> bool:
        """Whether these tokens take longer to compute than a shared store to say what it has of them."""
        answer_s, token_s = self._answers_s.get(store), self._seconds_a_token(start_token)
        return answer_s is None or token_s is None or answer_s <= token_s * num_tokens

    def doubt(self, stores: Iterable[str]) -> None:
        """Note that stores were left out because they are slow. After a while they seem faster, and are tried again."""
        for store in stores:
            if store in self._answers_s:
                self._answers_s[store] *= 1 - _DOUBT
            if store in self._loads:
                self._loads[store].doubt()
        self._fills.doubt()

    def choose(self, start_token: int, stores: Sequence[str]) -> LoadDecision:
        """Choose how many stored blocks are loaded, from the first on.

        Args:
            start_token: position of the first block.
            stores: the store of each block; those of one store are loaded in one call, all calls at the same time.

        Complexity: O(blocks).
        """
        best, best_gain_s = LoadDecision(0, None, None), 0.0
        counts: dict[str, int] = {}
        compute_s: float | None = 0.0
        for index, store in enumerate(stores):
            counts[store] = counts.get(store, 0) + 1
            token_s = self._seconds_a_token(start_token + index * self._block_size)
            compute_s = None if token_s is None or compute_s is None else compute_s + token_s * self._block_size
            load_s = self._load_s(counts)
            if compute_s is None or load_s is None:
                best = LoadDecision(index + 1, load_s, compute_s)
            elif compute_s - load_s >= best_gain_s:
                best, best_gain_s = LoadDecision(index + 1, load_s, compute_s), compute_s - load_s
        return best

    def _seconds_a_token(self, position: int) -> float | None:
        """Return the time of a token at a position, or at the nearest one before that was measured, or else after."""
        bucket = _bucket(position)
        before = [known for known in self._token_s if known <= bucket]
        nearest = max(before) if before else min(self._token_s, default=None)
        return None if nearest is None else self._token_s[nearest]

    def _load_s(self, counts: dict[str, int]) -> float | None:
        """Return the time of the slowest call and of filling the pool; None if one of the stores was never measured."""
        slowest_s = 0.0
        for store, num_blocks in counts.items():
            line = self._loads.get(store)
            if line is None:
                return None
            slowest_s = max(slowest_s, line.at(num_blocks + self._num_queued_blocks.get(store, 0)))
        return slowest_s + self._fills.at(sum(counts.values()))


class _Line:
    """Seconds as a straight line over blocks, by weighted least squares; what is older counts less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        sums = (self._weight, 1.0), (self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (old * (1 - _FORGET) + new for old, new in sums)

    def doubt(self) -> None:
        self._y, self._xy = self._y * (1 - _DOUBT), self._xy * (1 - _DOUBT)

    def at(self, x: float) -> float:
        """Return the seconds at `x`: at least 0, and growing with it; 0 while nothing was learned."""
        if not self._weight:
            return 0.0
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        start = (self._y - slope * self._x) / self._weight
        if slope <= 0 or start < 0:
            return self._y / self._x * x  # all measured alike: in proportion
        return start + slope * x


def _bucket(position: int) -> int:
    return (position // _FIRST_BUCKET_TOKENS).bit_length()
