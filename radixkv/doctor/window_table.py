"""Finds the cached segments that contain passages of a prompt, in a fixed amount of memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from radixkv.explain.realignment import Tokens, window_hashes

WINDOW_TOKENS = 32
NUM_SLOTS = 2**19
_SAMPLED_BITS = 6
_SHORT_TOKENS = 4096  # segments of at most this length have more windows in the sample
_SHORT_SAMPLED_BITS = 4
_HEAD_TOKENS = 8  # the first tokens of a window, which decide whether it is in the sample
_CHUNK_TOKENS = 65_536  # tokens that are examined at a time, to bound the memory
_MAX_SAMPLED = _CHUNK_TOKENS // 8  # in a chunk; a passage that repeats itself may have more
# Odd random factors, one for each position in a window: the hash of a window is a sum of products.
_FACTORS = np.random.default_rng(0).integers(2**63, size=WINDOW_TOKENS, dtype=np.uint64) | np.uint64(1)


class WindowTable:
    """Maps a sample of all windows of 32 tokens to the last segment that had them.

    About 1 in 64 windows is sampled; in segments of at most 4,096 tokens, 1 in 16. The first tokens of a window decide
    whether it is in the sample, so that equal passages have the same windows in it. The hash of a window selects its
    slot, in which it replaces another window. If hashes collide, a wrong segment is returned: callers compare tokens.

    Memory: 12 bytes per slot; 524,288 slots take 6 MiB. About half of the windows of a segment are left after 20
    million further tokens in segments of 50,000 tokens, or 5 million in segments of 2,000 tokens.

    Args:
        num_slots: a power of two.

    Example:
        >>> table, tokens = WindowTable(), np.arange(4096, dtype=np.uint32)
        >>> table.add(tokens, seed=7, segment_number=3)
        >>> [segment_number for segment_number, _ in table.find(tokens[1000:], seed=7).most_common()]
        [3]
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._mask = np.uint64(num_slots - 1)
        self._hashes = np.zeros(num_slots, np.uint64)
        self._segment_numbers = np.zeros(num_slots, np.uint32)

    def add(self, tokens: Tokens, seed: int, segment_number: int) -> None:
        """Add the tokens of a segment.

        Args:
            tokens: uint32 `[num_tokens]`.
            seed: 64 bits; windows are found only with the seed with which they were added.
            segment_number: number of the segment, 32 bits.

        Complexity: O(tokens).
        """
        hashes = _sampled_hashes(tokens, seed, _SHORT_SAMPLED_BITS if tokens.size <= _SHORT_TOKENS else _SAMPLED_BITS)
        slots = hashes & self._mask
        self._hashes[slots] = hashes
        self._segment_numbers[slots] = segment_number

    def find(self, tokens: Tokens, seed: int) -> Counter[int]:
        """Count the windows of these tokens by the segment that contains them. Complexity: O(tokens)."""
        hashes = _sampled_hashes(tokens, seed, _SHORT_SAMPLED_BITS)
        slots = hashes & self._mask
        return Counter(self._segment_numbers[slots][self._hashes[slots] == hashes].tolist())


def _sampled_hashes(tokens: Tokens, seed: int, num_bits: int) -> npt.NDArray[np.uint64]:
    """Return the hashes of 1 in `2**num_bits` windows; their low bits select a slot."""
    sampled_hashes = [np.empty(0, np.uint64)]
    for start in range(0, tokens.size - WINDOW_TOKENS + 1, _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS + WINDOW_TOKENS - 1]
        heads = window_hashes(chunk[: chunk.size - WINDOW_TOKENS + _HEAD_TOKENS], _HEAD_TOKENS)
        starts = np.flatnonzero(_mix(heads) >> np.uint64(64 - num_bits) == 0)[:_MAX_SAMPLED]
        windows = chunk[starts[:, None] + np.arange(WINDOW_TOKENS)] + np.uint64(1)  # so that token 0 counts
        sampled_hashes.append(_mix((windows * _FACTORS).sum(axis=1, dtype=np.uint64) ^ np.uint64(seed)))
    return np.concatenate(sampled_hashes)


def _mix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Let all bits of a hash depend on each other."""
    hashes = hashes ^ (hashes >> np.uint64(32))
    hashes *= np.uint64(0xBF58476D1CE4E5B9)  # the multiplier of SplitMix64
    return hashes ^ (hashes >> np.uint64(29))
