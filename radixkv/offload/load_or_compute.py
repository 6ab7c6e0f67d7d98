"""Decides whether stored blocks are loaded, or recomputed because that is faster."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_FIRST_BUCKET_TOKENS = 512
# Weight of a new measurement of a load, a copy, a lookup, or a step with `_FIRST_BUCKET_TOKENS` tokens.
_NEW_WEIGHT = 0.1
# Fraction by which the estimates of a tier shrink each time the tier is not used because it seems slow.
_SHRINK_FRACTION = 0.02


class LoadOrCompute:
    """Compares measured times of loads with measured times of steps.

    The time per token grows with the number of tokens before it, so steps are measured by position, in buckets of
    doubling length. Without measurements of both, blocks are loaded.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_s: dict[int, float] = {}  # seconds per token, by bucket
        self._loads: dict[str, _LinearFit] = {}  # seconds by number of blocks, of each tier
        self._lookups_s: dict[str, float] = {}  # seconds of a lookup in each shared store
        self._num_queued_blocks: dict[str, int] = {}
        self._fills = _LinearFit()  # seconds by number of blocks, from host memory into the pool

    def note_step(self, seconds: float, ranges: Sequence[tuple[int, int]]) -> None:
        """Record the time of a step that computed these ranges `[start, end)` of requests.

        Ranges of one token get no measurement, since decoding takes much longer per token than prefill.
        """
        token_s = seconds / sum(end - start for start, end in ranges)
        for start, end in ranges:
            if end - start > 1:
                bucket = _bucket(start)
                old_weight = (1 - _NEW_WEIGHT) ** ((end - start) / _FIRST_BUCKET_TOKENS)
                self._token_s[bucket] = token_s + old_weight * (self._token_s.get(bucket, token_s) - token_s)

    def note_start(self, tier: str, num_blocks: int) -> None:
        """Record that a load was queued."""
        self._num_queued_blocks[tier] = self._num_queued_blocks.get(tier, 0) + num_blocks

    def note_end(self, tier: str, num_blocks: int, seconds: float | None) -> None:
        """Record the end of a load. `seconds` is None if not all blocks were loaded: the time is not representative."""
        self._num_queued_blocks[tier] -= num_blocks
        if seconds is not None:
            self._loads.setdefault(tier, _LinearFit()).learn(num_blocks, seconds)

    def note_fill(self, num_blocks: int, seconds: float) -> None:
        """Record the time to copy loaded blocks into the pool: on a GPU, until the copy was complete."""
        self._fills.learn(num_blocks, seconds)

    def note_lookup(self, tier: str, seconds: float) -> None:
        """Record the time of a lookup in a shared store."""
        old_s = self._lookups_s.setdefault(tier, seconds)
        self._lookups_s[tier] = old_s + _NEW_WEIGHT * (seconds - old_s)

    def is_lookup_worthwhile(self, tier: str, start_token: int, num_tokens: int) -> bool:
        """Whether a lookup of the blocks of these tokens takes no longer than computing them; true if unknown."""
        lookup_s = self._lookups_s.get(tier)
        token_s = self._seconds_per_token(start_token)
        return lookup_s is None or token_s is None or lookup_s <= token_s * num_tokens

    def shrink_estimates(self, tiers: Collection[str]) -> None:
        """Record that tiers were not used because they seem slow: their estimates shrink, so they are tried again.

        If `tiers` is empty, nothing changes.
        """
        for tier in tiers:
            if tier in self._lookups_s:
                self._lookups_s[tier] *= 1 - _SHRINK_FRACTION
            if tier in self._loads:
                self._loads[tier].shrink_estimates()
        if tiers:
            self._fills.shrink_estimates()

    def choose(self, start_token: int, tiers: Sequence[str]) -> int:
        """Choose how many blocks of a run of stored blocks to load, from the first on.

        Args:
            start_token: position of the first block.
            tiers: the tier of each block. A tier loads its blocks in one call; the calls of the tiers run in parallel.

        Complexity: O(blocks).
        """
        num_blocks = 0
        best_gain_s = 0.0
        counts: dict[str, int] = {}
        compute_s: float | None = 0.0
        for index, tier in enumerate(tiers):
            counts[tier] = counts.get(tier, 0) + 1
            token_s = self._seconds_per_token(start_token + index * self._block_size)
            compute_s = None if token_s is None or compute_s is None else compute_s + token_s * self._block_size
            load_s = self._load_s(counts)
            if compute_s is None or load_s is None:
                num_blocks = index + 1
            elif compute_s - load_s >= best_gain_s:
                num_blocks = index + 1
                best_gain_s = compute_s - load_s
        return num_blocks

    def _seconds_per_token(self, position: int) -> float | None:
        """Return the time per token at a position, or at the nearest measured one before it, or else after it."""
        bucket = _bucket(position)
        before = [measured for measured in self._token_s if measured <= bucket]
        nearest = max(before) if before else min(self._token_s, default=None)
        return None if nearest is None else self._token_s[nearest]

    def _load_s(self, counts: dict[str, int]) -> float | None:
        """Return the time of the slowest call and of filling the pool; None if one of the tiers was never measured."""
        slowest_s = 0.0
        for tier, num_blocks in counts.items():
            load_fit = self._loads.get(tier)
            if load_fit is None:
                return None
            slowest_s = max(slowest_s, load_fit.at(num_blocks + self._num_queued_blocks.get(tier, 0)))
        return slowest_s + self._fills.at(sum(counts.values()))


class _LinearFit:
    """A linear fit of seconds over blocks: least squares, in which older measurements count less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        sums = (self._weight, 1.0), (self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (old * (1 - _NEW_WEIGHT) + new for old, new in sums)

    def shrink_estimates(self) -> None:
        self._y, self._xy = self._y * (1 - _SHRINK_FRACTION), self._xy * (1 - _SHRINK_FRACTION)

    def at(self, x: float) -> float:
        """Return the seconds at `x`: at least 0, and growing with it; 0 while nothing was learned."""
        if not self._weight:
            return 0.0
        spread = self._weight * self._xx - self._x * self._x
        has_spread = spread > 1e-9 * self._xx  # if all x are the same, only rounding errors remain
        slope = (self._weight * self._xy - self._x * self._y) / spread if has_spread else 0.0
        intercept = (self._y - slope * self._x) / self._weight
        if slope <= 0 or intercept < 0:
            return self._y / self._x * x  # no plausible line, for example if all x are the same: assume proportionality
        return intercept + slope * x


def _bucket(position: int) -> int:
    return (position // _FIRST_BUCKET_TOKENS).bit_length()
