"""Recognizes parts that a prompt and a cached branch have in another order, such as tools in a random order.

    prompt   | tool B  tool A | rest ...      The reordered parts end at `|`, where the rest begins on both sides.
    branch   | tool A  tool B | rest ...

`realign` may end the spans earlier, inside these parts: it aligns the two copies of tool A, as if tool B had been
inserted before them. `end_of_reordering` extends the spans to the end of all reordered parts.

As in `kinds.py`, both sides begin with the first token that differs, and the span of a side is the tokens that must be
skipped there until both sides are equal again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.explain.realignment import MIN_EQUAL_TOKENS, Realignment, Tokens, num_equal_tokens, realign, window_hashes

_MIN_REORDERED_TOKENS = 8  # shorter spans never count as reordered
_REORDERED_SHARE = 0.9  # two spans have the same tokens if they share at least this part of the longer span
_WINDOW_TOKENS = 8  # a span that was moved is searched for on the other side in windows of this length
_MOVED_SHARE = 0.8  # minimum share of the windows of a moved span that are found
_MAX_SEARCHED_TOKENS = 16_384  # of each side
# Two reordered spans may differ in their lengths by this many tokens, and this share of their tokens may be in only one
# of them, because a tokenizer may split the same text differently next to other text.
_MAX_SHIFT_TOKENS = 16
_MAX_UNSHARED_SHARE = 0.06
_MAX_ENDS = 64  # positions that are examined as ends of reordered spans
_REPLACED_FACTOR = 4  # a span counts as replaced only if at least this many times as many equal tokens follow it
_MIN_REPLACED_TOKENS = 5  # shorter spans may occur on the other side by chance
_MAX_READ_TOKENS = 4096  # longer spans are not compared as text
_NUM_FOLLOWING_TOKENS = 8  # equal tokens that are decoded with a span, since its last word may continue in them

_WORD = re.compile(r"\w+")


def is_reordered(prompt: Tokens, branch: Tokens, realignment: Realignment) -> bool:
    """Whether the differing spans have the same content in another order.

    This is so if both spans have the same tokens. It is also so if one of the spans was moved: most of it occurs later
    on the other side, at least as often as on its own side.
    """
    prompt_span, branch_span = prompt[: realignment.prompt_span], branch[: realignment.branch_span]
    if has_same_tokens(prompt_span, branch_span):
        return True
    return _is_moved(prompt_span, prompt, branch[branch_span.size :]) or _is_moved(
        branch_span, branch, prompt[prompt_span.size :]
    )


def has_same_tokens(first: Tokens, second: Tokens) -> bool:
    """Whether two spans of at least 8 tokens have almost the same tokens, each equally often, in any order."""
    shorter, longer = sorted((first.size, second.size))
    if shorter < max(_MIN_REORDERED_TOKENS, _REORDERED_SHARE * longer):
        return False
    return _num_shared(first, second) >= _REORDERED_SHARE * longer


def has_same_words(first: str, second: str) -> bool:
    """Whether two texts have the same words, but in another order."""
    first_words, second_words = _WORD.findall(first), _WORD.findall(second)
    return first_words != second_words and sorted(first_words) == sorted(second_words)


def end_of_permutation(prompt: Tokens, branch: Tokens, realignment: Realignment) -> Realignment:
    """Return the end of equally long spans that have the same tokens in another order.

    The spans end at the first position that is followed by equal tokens on both sides. If the spans before it do not
    have the same tokens, or if there is no such position, `realignment` is returned.
    """
    length = min(prompt.size, branch.size)
    starts = _run_starts(prompt[:length] == branch[:length])
    if not starts:
        return realignment
    span = starts[0]
    if not has_same_tokens(prompt[:span], branch[:span]):
        return realignment
    return Realignment(span, span, num_equal_tokens(prompt[span:], branch[span:]))


def end_of_reordering(
    prompt: Tokens, branch: Tokens, realignment: Realignment, text_of: Callable[[Tokens], str] | None = None
) -> Realignment:
    """Return the end of spans that have the same parts in another order; `realignment` if there are no such spans.

    Unlike those of `end_of_permutation`, the spans may have slightly different lengths, since a tokenizer may split the
    same text differently next to other text. And they may extend beyond the first run of equal tokens: reordered parts
    such as JSON objects with the same keys may have equal tokens at the same position by chance.

    Args:
        prompt, branch: tokens from the difference on.
        realignment: where both sides are equal again, as `realign` returns it.
        text_of: returns the text of tokens from the difference on, so that spans whose tokens differ much are still
            recognized if they have the same words in another order. None without a tokenizer.
    """
    permutation = end_of_permutation(prompt, branch, realignment)
    has_unequal_spans = realignment.prompt_span != realignment.branch_span
    if (not has_unequal_spans and permutation == realignment) or _is_replaced(prompt, branch, realignment):
        return realignment
    ends = _possible_ends(prompt, branch)
    if permutation != realignment:
        ends.append(_End.of(prompt, branch, permutation.prompt_span, permutation.branch_span))
    if not ends:
        return realignment
    num_unshared, best = _best_end(prompt, branch, ends)
    if not has_unequal_spans:
        return best

    # Spans of unequal length may also differ by an insertion. They count as reordered if few of the tokens that differ
    # are unshared, or if their words are the same.
    num_different = _num_different(prompt, branch, realignment, best)
    if num_unshared <= num_different // 8 + min(num_different // 4, 8):
        return best
    is_too_long = max(best.prompt_span, best.branch_span) > _MAX_READ_TOKENS
    if text_of is None or num_unshared > num_different or is_too_long:
        return realignment
    prompt_text = text_of(prompt[: best.prompt_span + _NUM_FOLLOWING_TOKENS])
    branch_text = text_of(branch[: best.branch_span + _NUM_FOLLOWING_TOKENS])
    return best if has_same_words(prompt_text, branch_text) else realignment


class _End(NamedTuple):
    """A possible end of reordered spans.

    Attributes:
        num_unshared: tokens that only one of both spans has. A token that one span has three times and the other one
            once counts twice.
        prompt_end, branch_end: lengths of the spans.
    """

    num_unshared: int
    prompt_end: int
    branch_end: int

    @classmethod
    def of(cls, prompt: Tokens, branch: Tokens, prompt_end: int, branch_end: int) -> _End:
        """Return an end with its number of unshared tokens."""
        num_shared = _num_shared(prompt[:prompt_end], branch[:branch_end])
        return cls(prompt_end + branch_end - 2 * num_shared, prompt_end, branch_end)

    @property
    def unshared_share(self) -> float:
        """Unshared tokens per token of the prompt's span."""
        return self.num_unshared / self.prompt_end


def _possible_ends(prompt: Tokens, branch: Tokens) -> list[_End]:
    """Return the positions before which both sides have almost the same tokens, and after which their tokens are equal.

    The positions may differ by up to `_MAX_SHIFT_TOKENS`.
    """
    ends: list[_End] = []
    num_examined = 0
    for shift in sorted(range(-_MAX_SHIFT_TOKENS, _MAX_SHIFT_TOKENS + 1), key=abs):
        prompt_offset, branch_offset = max(0, -shift), max(0, shift)
        length = min(prompt.size - prompt_offset, branch.size - branch_offset, _MAX_SEARCHED_TOKENS)
        is_equal = prompt[prompt_offset : prompt_offset + length] == branch[branch_offset : branch_offset + length]
        starts = [start for start in _run_starts(is_equal) if start >= _MIN_REORDERED_TOKENS]
        starts = starts[: _MAX_ENDS - num_examined]
        num_examined += len(starts)
        for start in starts:
            end = _End.of(prompt, branch, prompt_offset + start, branch_offset + start)
            if end.num_unshared <= _MAX_UNSHARED_SHARE * (end.prompt_end + end.branch_end):
                ends.append(end)
    return ends


def _best_end(prompt: Tokens, branch: Tokens, ends: Sequence[_End]) -> tuple[int, Realignment]:
    """Return the number of unshared tokens of the best end, and that end.

    The end with the fewest unshared tokens is the best one, and of several such ends the first one. But if the run of
    equal tokens after it is not longer than its span, the run may be equal by chance. Then a later end with a smaller
    share of unshared tokens is better, and is checked in the same way.
    """
    end = min(ends)
    while (num_equal := num_equal_tokens(prompt[end.prompt_end :], branch[end.branch_end :])) <= end.prompt_end:
        later_ends = [
            each for each in ends if each.prompt_end > end.prompt_end and each.unshared_share < end.unshared_share
        ]
        if not later_ends:
            break
        end = min(later_ends, key=lambda each: each.unshared_share)
    return end.num_unshared, Realignment(end.prompt_end, end.branch_end, num_equal)


def _is_replaced(prompt: Tokens, branch: Tokens, realignment: Realignment) -> bool:
    """Whether both spans are short and do not occur on the other side: one was replaced by the other, such as an id.

    Later parts may still be in another order, but that is a difference of its own.
    """
    prompt_span, branch_span, num_equal = realignment
    if not min(prompt_span, branch_span) or num_equal < _REPLACED_FACTOR * max(prompt_span, branch_span):
        return False
    for own_side, span, other_side in ((prompt, prompt_span, branch), (branch, branch_span, prompt)):
        # Without its first and last token, since a tokenizer may split the text at the edges of a part differently.
        if span >= _MIN_REPLACED_TOKENS and _occurs_in(own_side[1 : span - 1], other_side[:_MAX_SEARCHED_TOKENS]):
            return False
    return True


def _occurs_in(passage: Tokens, tokens: Tokens) -> bool:
    """Whether a passage occurs in a run of tokens."""
    haystack, needle, position = tokens.tobytes(), passage.tobytes(), -1
    while (position := haystack.find(needle, position + 1)) >= 0:
        if position % tokens.itemsize == 0:
            return True
    return False


def _num_different(prompt: Tokens, branch: Tokens, realignment: Realignment, end: Realignment) -> int:
    """Return how many tokens differ before an end: the sum of all spans up to there, of each the longer side."""
    num_different = max(realignment.prompt_span, realignment.branch_span)
    prompt_position = realignment.prompt_span + realignment.equal_tokens
    branch_position = realignment.branch_span + realignment.equal_tokens
    for _ in range(_MAX_ENDS):
        following = realign(prompt[prompt_position : end.prompt_span], branch[branch_position : end.branch_span])
        if following is None:
            return num_different + max(0, end.prompt_span - prompt_position, end.branch_span - branch_position)
        num_different += max(following.prompt_span, following.branch_span)
        prompt_position += following.prompt_span + following.equal_tokens
        branch_position += following.branch_span + following.equal_tokens
    return num_different


def _run_starts(is_equal: npt.NDArray[np.bool_]) -> list[int]:
    """Return where runs of at least `MIN_EQUAL_TOKENS` equal tokens begin."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_equal, [False]))))
    starts, ends = edges[::2], edges[1::2]
    long_starts: list[int] = starts[ends - starts >= MIN_EQUAL_TOKENS].tolist()
    return long_starts


def _num_shared(first: Tokens, second: Tokens) -> int:
    """Return the size of the multiset intersection of both spans. NumPy sorts the tokens without the GIL."""
    ids, counts = np.unique(first, return_counts=True)
    other_ids, other_counts = np.unique(second, return_counts=True)
    _, at, other_at = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[at], other_counts[other_at]).sum())


def _is_moved(span: Tokens, own_side: Tokens, other_side: Tokens) -> bool:
    """Whether most windows of a span occur on the other side, at least as often as on its own side."""
    if span.size < 2 * _WINDOW_TOKENS:
        return False
    windows = np.unique(window_hashes(span[:_MAX_SEARCHED_TOKENS], _WINDOW_TOKENS))
    own_counts, other_counts = (_window_counts(windows, side[:_MAX_SEARCHED_TOKENS]) for side in (own_side, other_side))
    return int((other_counts >= own_counts).sum()) >= _MOVED_SHARE * windows.size


def _window_counts(windows: npt.NDArray[np.uint64], tokens: Tokens) -> npt.NDArray[np.intp]:
    """Return how often each window, given by its hash, occurs in a run of tokens."""
    hashes = np.sort(window_hashes(tokens, _WINDOW_TOKENS))
    return np.searchsorted(hashes, windows, "right") - np.searchsorted(hashes, windows, "left")
