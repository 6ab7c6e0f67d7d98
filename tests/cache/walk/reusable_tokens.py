"""An exact count of the tokens that an infinite prefix cache would reuse, which imports nothing of radixkv."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def count_reusable_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Count, for prompts served one after another, the tokens that an infinite cache gives each.

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
    earlier: list[bytes] = []  # sorted
    for prompt in prompts:
        # Big-endian, so that bytes sort like tokens; all that matters is that a token is four bytes.
        key = b"".join(int(token).to_bytes(4, "big") for token in prompt)
        place = bisect_left(earlier, key)
        shared = max((_common_tokens(key, other) for other in earlier[max(0, place - 1) : place + 1]), default=0)
        counts.append(min(shared, len(prompt) - 1))
        insort(earlier, key)
    return counts


def _common_tokens(a: bytes, b: bytes) -> int:
    shortest = min(len(a), len(b))
    low, high = 0, shortest // 4  # a and b agree on `low` tokens, and on no more than `high`
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * 4] == b[: middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low
