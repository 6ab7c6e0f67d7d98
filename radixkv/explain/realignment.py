"""Finds where two runs of tokens that begin differently are equal again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

MIN_EQUAL_TOKENS = 32
MAX_SPAN_TOKENS = 65_536
_NEAR_TOKENS = 2048  # the first tokens of each side, which are searched before all others, since most spans are short
_MAX_RUNS = 64  # maximum number of runs of equal tokens that are compared
_HASH_FACTOR = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


class Realignment(NamedTuple):
    """The spans after which two runs of tokens are equal again.

    Attributes:
        prompt_span, branch_span: number of tokens that are skipped in the prompt and in the branch.
        equal_tokens: number of equal tokens after these spans, at least `MIN_EQUAL_TOKENS`.
    """

    prompt_span: int
    branch_span: int
    equal_tokens: int


def realign(prompt: Tokens, branch: Tokens) -> Realignment | None:
    """Find short spans after which both sides are equal for at least `MIN_EQUAL_TOKENS` tokens.

    Runs of equal tokens are found by windows of `MIN_EQUAL_TOKENS` tokens that both sides have, and that begin within
    the first `MAX_SPAN_TOKENS` tokens of each side. If a side has a window several times, its first position counts.

    The nearest run is not always the right one: a passage that recurs, such as a reminder, may be nearer than the run
    that continues both sides. So if the nearest window skips `n` tokens, counted over both sides, the longest run with
    a window that skips at most `2 n + MIN_EQUAL_TOKENS` is chosen. Of equally long runs, the one that skips the fewest
    tokens is chosen, and of these the one that skips the fewest of the prompt.

    Args:
        prompt: tokens of the prompt, uint32 `[num_prompt_tokens]`, from the position at which the two diverge.
        branch: tokens of the branch from there, uint32 `[num_branch_tokens]`.

    Returns:
        The spans and the run after them; None if there is no run. The tokens of the run are compared, so they are
        really equal. A collision of 64-bit hashes can only hide a run.

    Complexity: O(n log n) in at most `MAX_SPAN_TOKENS` tokens of each side, and the comparison of at most 64 runs.

    Example:
        >>> tail = np.arange(100, 140, dtype=np.uint32)
        >>> realign(np.append(np.uint32([1, 2]), tail), np.append(np.uint32([3]), tail))
        Realignment(prompt_span=2, branch_span=1, equal_tokens=40)
    """
    nearest, max_skipped = _search(prompt, branch, _NEAR_TOKENS)
    # A window that skips at most `max_skipped` tokens begins in the near tokens, so a wider search finds no other one.
    is_complete = nearest is not None and max_skipped < _NEAR_TOKENS
    if is_complete or max(prompt.size, branch.size) <= _NEAR_TOKENS:
        return nearest
    return _search(prompt, branch, MAX_SPAN_TOKENS)[0]


def _search(prompt: Tokens, branch: Tokens, max_span: int) -> tuple[Realignment | None, int]:
    """Search the windows that begin within the first `max_span` tokens of each side.

    Returns:
        The realignment that `realign` describes, or None; and the maximum number of tokens, counted over both sides,
        that a window may skip to be examined.
    """
    num_tokens = max_span + MIN_EQUAL_TOKENS - 1
    _, prompt_starts, branch_starts = np.intersect1d(
        window_hashes(prompt[:num_tokens]), window_hashes(branch[:num_tokens]), return_indices=True
    )  # the first position of each hash on either side
    order = np.argsort(prompt_starts + branch_starts, kind="stable")
    best: Realignment | None = None
    run_ends: dict[int, int] = {}  # where the last run ends in the prompt, by the difference of the positions
    max_skipped, num_runs = num_tokens * 2, 0
    for prompt_start, branch_start in zip(prompt_starts[order].tolist(), branch_starts[order].tolist(), strict=True):
        if prompt_start + branch_start > max_skipped or num_runs == _MAX_RUNS:
            break
        if prompt_start < run_ends.get(prompt_start - branch_start, 0):
            continue
        num_runs += 1
        run = _run_at(prompt, branch, prompt_start, branch_start)
        run_ends[prompt_start - branch_start] = run.prompt_span + run.equal_tokens
        if run.equal_tokens < MIN_EQUAL_TOKENS:
            continue  # the hashes collide
        if best is None:
            max_skipped = 2 * (prompt_start + branch_start) + MIN_EQUAL_TOKENS
        if best is None or _rank(run) > _rank(best):
            best = run
    return best, max_skipped


def _run_at(prompt: Tokens, branch: Tokens, prompt_start: int, branch_start: int) -> Realignment:
    """Return the run of equal tokens around two positions."""
    num_before = num_equal_tokens(prompt[:prompt_start][::-1], branch[:branch_start][::-1])
    num_after = num_equal_tokens(prompt[prompt_start:], branch[branch_start:])
    return Realignment(prompt_start - num_before, branch_start - num_before, num_before + num_after)


def _rank(run: Realignment) -> tuple[int, int, int]:
    return run.equal_tokens, -run.prompt_span - run.branch_span, -run.prompt_span


def num_equal_tokens(first: Tokens, second: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(first.size, second.size)
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def window_hashes(tokens: Tokens, size: int = MIN_EQUAL_TOKENS) -> npt.NDArray[np.uint64]:
    """Hash each window of `size` tokens, a power of two: uint64 `[max(0, num_tokens - size + 1)]`.

    The hash of a window is a polynomial of its tokens, computed from those of its halves.
    """
    if tokens.size < size:
        return np.empty(0, np.uint64)
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    factor, length = _HASH_FACTOR, 1
    while length < size:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor, length = factor * factor % 2**64, 2 * length
    return hashes
