"""An exact count of the tokens that an infinite prefix cache would reuse, which imports nothing of radixkv."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def count_reusable_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Count, for prompts served one after another, the tokens of each that an infinite cache has.

    That is the longest common prefix with any earlier prompt, but never the whole prompt: the last token is always
    computed.

    Args:
        prompts: lists, tuples or arrays of token ids, each at least one token.

    Returns:
        One count for each prompt.

    Complexity:
        O(log n) prompt comparisons per prompt. Among sorted prompts, the longest common prefix is with a neighbor.
    """
    counts: list[int] = []
    sorted_keys: list[bytes] = []  # of the earlier prompts
    for prompt in prompts:
        # Big-endian, so that keys sort like prompts.
        key = b"".join(int(token).to_bytes(4, "big") for token in prompt)
        index = bisect_left(sorted_keys, key)
        neighbors = sorted_keys[max(0, index - 1) : index + 1]
        num_common = max((_num_common_tokens(key, neighbor) for neighbor in neighbors), default=0)
        counts.append(min(num_common, len(prompt) - 1))
        insort(sorted_keys, key)
    return counts


def _num_common_tokens(a: bytes, b: bytes) -> int:
    """Count the tokens at the beginning that two keys have in common, by binary search."""
    low, high = 0, min(len(a), len(b)) // 4  # a and b agree on `low` tokens, and on no more than `high`
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * 4] == b[: middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low
