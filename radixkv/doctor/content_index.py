"""Finds the earlier prompts of a namespace that contain, at any position, what a prompt has to compute."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import repeat

import numpy as np

from radixkv.explain.realignment import MIN_EQUAL_TOKENS, Tokens, window_hashes

MAX_CANDIDATES = 5
"""Maximum number of earlier prompts that are returned for a prompt."""

_MAX_FIRST = 2  # candidates that were the first prompts with their contents
_MIN_SAMPLED_BITS = 4
_MAX_SAMPLED_BITS = 10
_SPLITMIX_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # the multiplier of SplitMix64, which mixes bits well
_MAX_WINDOWS = 2**21  # approximate maximum of the indexed windows, which take 200 bytes each


class ContentIndex:
    """Maps the contents of prompts to the last prompt that has them, and to the first one.

    The last prompt is usually the previous one of the conversation. If the last prompt has the same fault, such as a
    wrong order of tools, the first prompt may still be without the fault, and then shows better what it is.

    A sample of all windows of 32 tokens is indexed. The sample is chosen by the hashes, so that equal passages have the
    same windows in it. A collision of hashes only adds a candidate.

    Args:
        num_tokens: tokens of all prompts. One of 16 windows is indexed, or one of up to 1,024 if there are many tokens.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        bits = max(_MIN_SAMPLED_BITS, (num_tokens // _MAX_WINDOWS).bit_length())
        self._sampled_bits = min(_MAX_SAMPLED_BITS, bits)
        self._last: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def add(self, number: int, seed: int, tokens: Tokens) -> None:
        """Add the tokens of a prompt.

        Args:
            number: number of the prompt.
            seed: seed of the namespace of the prompt.
            tokens: uint32 `[num_tokens]`.

        Complexity: O(tokens).
        """
        keys = self._sampled_keys(tokens, seed)
        self._last.update(zip(keys, repeat(number)))
        for key in keys:
            self._first.setdefault(key, number)

    def candidates(self, seed: int, tokens: Tokens, start: int) -> list[int]:
        """Return the prompts that have most of the tokens after `start`, at most `MAX_CANDIDATES`.

        First come the prompts to which most windows of these tokens map as the last prompt that has them, then those to
        which most windows map as the first one. Of prompts with equally many windows, later ones come first.
        """
        keys = self._sampled_keys(tokens[start:], seed)
        candidates: dict[int, None] = {}
        for prompt_of_key, limit in ((self._last, MAX_CANDIDATES - _MAX_FIRST), (self._first, _MAX_FIRST)):
            num_windows = Counter(prompt_of_key[key] for key in keys if key in prompt_of_key)
            best = heapq.nlargest(limit, num_windows, key=lambda number: (num_windows[number], number))
            candidates |= dict.fromkeys(best)
        return list(candidates)

    def _sampled_keys(self, tokens: Tokens, seed: int) -> list[int]:
        if tokens.size < MIN_EQUAL_TOKENS:
            return []
        hashes = window_hashes(tokens)
        mixed = (hashes ^ (hashes >> np.uint64(29))) * _SPLITMIX_FACTOR
        # The highest bits decide: the low bits of a product depend on few bits of its factors.
        chosen = hashes[mixed >> np.uint64(64 - self._sampled_bits) == 0]
        keys: list[int] = (chosen ^ np.uint64(seed)).tolist()
        return keys
