"""Decides what kind of span differs between a prompt and a cached branch, by their tokens and, if known, their text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from radixkv.api.explanation import DifferenceKind
from radixkv.explain.realignment import MIN_EQUAL_TOKENS, Realignment, Tokens

_MIN_REORDERED_TOKENS = 8
_REORDERED_SHARE = 0.9
_GRAM_TOKENS = 8
_MOVED_SHARE = 0.8
_MAX_MOVED_TOKENS = 16_384
_MIN_INSERTED_TOKENS = 16
_NUM_EDGE_TOKENS = 2
_MIN_RETOKENIZED_CHARS = 8
# Dates, times and ids are searched so far around a difference. A regular expression that searches a whole text would
# hold the GIL until it finds something.
_MAX_MATCH_CHARS = 128

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?)"
_ZONE = r"(?:Z|UTC|GMT|CES?T|[ECMP][SD]T|[AaPp]\.?[Mm]\b\.?|[+-]\d\d:?\d\d)"
_DATES = (
    r"\d{4}-\d\d?-\d\d?(?!\d)",
    r"\d{4}/\d\d?/\d\d?(?!\d)",
    r"\d\d?/\d\d?/(?:\d{4}|\d\d)(?!\d)",
    r"\d\d?\.\d\d?\.\d{4}(?!\d)",
    r"(?:19|20)\d{6}(?=T\d{4})",
    rf"{_MONTH}\.? {_DAY}(?:,? \d{{4}})?",
    rf"{_DAY} {_MONTH}\.?,?(?: \d{{4}})?",
    rf"{_MONTH}\.?,? \d{{4}}",
)
_TIMES = (r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?", r"(?<=T)\d{6}(?:\.\d+)?", r"\d\d? ?[AaPp]\.?[Mm]\b")
_UNIX_TIME = r"(?<![\w.])1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\w)"
_STRONG = "|".join((*_DATES, *_TIMES))
_DATE_OR_TIME = re.compile(
    rf"(?<![\w.])(?:{_WEEKDAY},? )?(?:{_STRONG})(?:(?:[T,]? ?(?:at )?(?:{_STRONG}))|(?: ?{_ZONE}))*"
    rf"(?:,? \d{{4}})?(?:,? \(?{_WEEKDAY}\)?)?|{_UNIX_TIME}|{_WEEKDAY}"
)
_UUID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
_WORD = re.compile(r"[A-Za-z0-9]+")
_ANY_WORD = re.compile(r"\w+")
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_NUMBERED = re.compile(r"([A-Za-z]*)(\d+)([A-Za-z]*)")
_MIN_HEX = 3  # such as the build suffix in the first line of the system prompts of a coding agent
_MIN_ID = 8
_MIN_ID_CHARS = 5  # different ones


class TextPair(NamedTuple):
    """The text around a difference on both sides, and the range of characters that differs.

    Attributes:
        prompt, branch: text of the differing spans with some equal text before and after.
        start: characters that both have in common at the beginning.
        prompt_end, branch_end: where their common end begins.
    """

    prompt: str
    branch: str
    start: int
    prompt_end: int
    branch_end: int

    @classmethod
    def of(cls, prompt: str, branch: str, *, has_same_end: bool) -> TextPair:
        """Return two texts with the range that differs.

        Args:
            prompt, branch: the texts.
            has_same_end: whether they were cut where the tokens are equal again; if not, everything after the first
                different character counts as different.
        """
        start = _num_equal(prompt, branch)
        num_same = _num_equal(reversed(prompt[start:]), reversed(branch[start:])) if has_same_end else 0
        return cls(prompt, branch, start, len(prompt) - num_same, len(branch) - num_same)

    def words(self) -> tuple[list[str], list[str]]:
        """Return the words, of ASCII letters and digits, that differ in the prompt and in the branch.

        If only one side has a span, there are none, unless it is a part of a word, such as a digit of a number.
        """
        sides = _sides(self)
        if any(start == end for _, start, end in sides) and not any(_is_in_word(*side) for side in sides):
            return [], []
        return _words(*sides[0]), _words(*sides[1])


def kind_of(
    prompt: Tokens, branch: Tokens, place: Realignment | None, *, is_first: bool, texts: TextPair | None
) -> DifferenceKind:
    """Return what kind of span differs.

    Without text, only the kinds that tokens show are returned: FIRST_TOKEN, INSERTED, REMOVED, REORDERED, REPLACED and
    UNCLASSIFIED.

    Args:
        prompt, branch: tokens from the difference on, uint32.
        place: where they are equal again; None if they are not.
        is_first: whether the difference is at the beginning of the prompt.
        texts: the text around the differing spans; None without a tokenizer.
    """
    if is_first and place is not None and max(place[:2]) == 1 and _is_without_text(texts):
        return DifferenceKind.FIRST_TOKEN
    if texts is not None:
        kind = _kind_of_text(texts, place)
        if kind is not None:
            return kind
    if place is None:
        return DifferenceKind.UNCLASSIFIED
    if is_reordered(prompt, branch, place):
        return DifferenceKind.REORDERED
    prompt_size, branch_size = place.prompt_span, place.branch_span
    if texts is not None and not _is_without_text(texts):
        prompt_size, branch_size = texts.prompt_end - texts.start, texts.branch_end - texts.start
    elif max(prompt_size, branch_size) >= _MIN_INSERTED_TOKENS:
        # Next to an inserted span, a tokenizer may split the text that both sides have in another way.
        prompt_size, branch_size = max(0, prompt_size - _NUM_EDGE_TOKENS), max(0, branch_size - _NUM_EDGE_TOKENS)
    if not branch_size:
        return DifferenceKind.INSERTED
    return DifferenceKind.REPLACED if prompt_size else DifferenceKind.REMOVED


def _is_without_text(texts: TextPair | None) -> bool:
    """Whether the differing spans are special tokens, which have no text, or no text is known."""
    return texts is None or (texts.prompt_end <= texts.start and texts.branch_end <= texts.start)


def _kind_of_text(texts: TextPair, place: Realignment | None) -> DifferenceKind | None:
    """Return the kind that the text shows; None if it shows none."""
    if _is_retokenized(texts, place):
        return DifferenceKind.RETOKENIZED
    if place is None:
        texts = _first_words(texts)
    prompt, branch = texts.words()
    if not prompt and not branch:
        return None
    if _are_uuids(texts):
        return DifferenceKind.RANDOM_ID
    if all(_is_date_or_time(*side) for side in _sides(texts)):
        return DifferenceKind.DATE_OR_TIME
    pairs = [pair for pair in zip_longest(prompt, branch, fillvalue="") if pair[0] != pair[1]]
    if pairs and all(_are_numbers(*pair) for pair in pairs):
        return DifferenceKind.NUMBER
    if pairs and all(_are_numbers(*pair) or _are_ids(*pair) for pair in pairs):
        return DifferenceKind.RANDOM_ID
    if place is not None and len(prompt) > 1 and _is_permutation(texts):
        return DifferenceKind.REORDERED
    return None


def _is_retokenized(texts: TextPair, place: Realignment | None) -> bool:
    """Whether the texts are equal although their tokens differ."""
    if place is not None:
        is_same = texts.prompt_end <= texts.start and texts.branch_end <= texts.start
        return is_same and place.prompt_span > 0 and place.branch_span > 0
    num_chars = min(len(texts.prompt), len(texts.branch))  # one may be shorter, since both have as many tokens
    return num_chars >= _MIN_RETOKENIZED_CHARS and texts.start >= num_chars - 1


def _first_words(texts: TextPair) -> TextPair:
    """Return texts whose difference ends with the word in which it begins."""
    ends = []
    for text in (texts.prompt, texts.branch):
        end = texts.start
        while end < len(text) and not text[end].isspace():
            end += 1
        ends.append(end)
    return texts._replace(prompt_end=ends[0], branch_end=ends[1])


def _sides(texts: TextPair) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    return (texts.prompt, texts.start, texts.prompt_end), (texts.branch, texts.start, texts.branch_end)


def _are_uuids(texts: TextPair) -> bool:
    return all(_is_within(_UUID, *side) for side in _sides(texts))


def _is_within(pattern: re.Pattern[str], text: str, start: int, end: int) -> bool:
    """Whether a match of a pattern contains a range, and begins and ends near it. Complexity: O(1)."""
    if end - start > _MAX_MATCH_CHARS:
        return False
    matches = pattern.finditer(text, max(0, start - _MAX_MATCH_CHARS), end + _MAX_MATCH_CHARS)
    return any(match.start() <= start and end <= match.end() for match in matches)


def _is_date_or_time(text: str, start: int, end: int) -> bool:
    """Whether a date or a time contains the range, apart from spaces and punctuation at its ends."""
    while end > start and text[end - 1] in " ,.;)\n":
        end -= 1
    return _is_within(_DATE_OR_TIME, text, start, end)


def _are_numbers(first: str, second: str) -> bool:
    """Whether two words are numbers, perhaps with the same letters before or after them."""
    one, other = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(second)
    return one is not None and other is not None and (one[1], one[3]) == (other[1], other[3])


def _are_ids(first: str, second: str) -> bool:
    """Whether two words look random: hexadecimal digits, or letters and digits in turn."""
    has_both = any(word.isalnum() and not word.isdigit() and not word.isalpha() for word in (first, second))
    if not has_both:
        return False
    if _HEX.fullmatch(first) and _HEX.fullmatch(second):
        return len(first) == len(second) >= _MIN_HEX or min(len(first), len(second)) >= _MIN_ID
    return min(len(first), len(second)) >= _MIN_ID and (_is_mixed(first) or _is_mixed(second))


def _is_mixed(word: str) -> bool:
    """Whether letters and digits change at least twice in a word of several different characters."""
    num_changes = sum(one.isdigit() != other.isdigit() for one, other in pairwise(word))
    return num_changes >= 2 and len(set(word)) >= _MIN_ID_CHARS


def _is_permutation(texts: TextPair) -> bool:
    """Whether the differing texts have the same words in another order."""
    first = _ANY_WORD.findall(texts.prompt[texts.start : texts.prompt_end])
    second = _ANY_WORD.findall(texts.branch[texts.start : texts.branch_end])
    return len(first) > 1 and first != second and sorted(first) == sorted(second)


def is_reordered(prompt: Tokens, branch: Tokens, place: Realignment) -> bool:
    """Whether the differing spans are in another order on the other side.

    Either both spans have the same tokens, or the skipped span of one side is found later on the other side, and is not
    repeated on its own side.
    """
    if _is_same_multiset(prompt[: place.prompt_span], branch[: place.branch_span]):
        return True
    return _is_moved(prompt[: place.prompt_span], prompt, branch[place.branch_span :]) or _is_moved(
        branch[: place.branch_span], branch, prompt[place.prompt_span :]
    )


def permuted(prompt: Tokens, branch: Tokens, place: Realignment) -> Realignment:
    """Return the end of spans that have the same tokens in another order; `place` if there is no such end.

    The shortest pair of spans ends before the first part that both sides have, so a part that was moved would differ
    once more later. Both sides are as long again after all moved parts.
    """
    length = min(prompt.size, branch.size)
    is_equal = prompt[:length] == branch[:length]
    if length < MIN_EQUAL_TOKENS:
        return place
    sums = np.concatenate(([0], np.cumsum(is_equal)))
    starts = np.flatnonzero(sums[MIN_EQUAL_TOKENS:] - sums[:-MIN_EQUAL_TOKENS] == MIN_EQUAL_TOKENS)
    if not starts.size:
        return place
    span = int(starts[0])
    if not _is_same_multiset(prompt[:span], branch[:span]):
        return place
    after = is_equal[span:]
    return Realignment(span, span, after.size if after.all() else int((~after).argmax()))


def _is_same_multiset(first: Tokens, second: Tokens) -> bool:
    """Whether almost the same tokens occur on both sides, as often. They are sorted by numpy, without the GIL."""
    shorter, longer = sorted((first.size, second.size))
    if shorter < max(_MIN_REORDERED_TOKENS, _REORDERED_SHARE * longer):
        return False
    ids, counts = np.unique(first, return_counts=True)
    other_ids, other_counts = np.unique(second, return_counts=True)
    _, at, other_at = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[at], other_counts[other_at]).sum()) >= _REORDERED_SHARE * longer


def _is_moved(span: Tokens, own: Tokens, other: Tokens) -> bool:
    """Whether most of a span is found on the other side, as often as on its own side."""
    if span.size < 2 * _GRAM_TOKENS:
        return False
    own_counts, other_counts = Counter(_grams(own[:_MAX_MOVED_TOKENS])), Counter(_grams(other[:_MAX_MOVED_TOKENS]))
    grams = set(_grams(span[:_MAX_MOVED_TOKENS]))
    num_moved = sum(other_counts[each] >= own_counts[each] for each in grams)
    return num_moved >= _MOVED_SHARE * len(grams)


def _grams(tokens: Tokens) -> Iterable[bytes]:
    data = tokens.tobytes()
    size = tokens.itemsize
    return (data[start : start + _GRAM_TOKENS * size] for start in range(0, len(data) - _GRAM_TOKENS * size + 1, size))


def _is_in_word(text: str, start: int, end: int) -> bool:
    """Whether a range that is not empty begins or ends inside a word."""
    if start == end:
        return False
    begins_inside = start > 0 and text[start - 1 : start + 1].isalnum()
    ends_inside = end < len(text) and text[end - 1 : end + 1].isalnum()
    return begins_inside or ends_inside


def _words(text: str, start: int, end: int) -> list[str]:
    """Return the words that overlap a range, or touch an empty one."""
    is_empty = start == end
    first, last = start, end  # of the searched text, which ends where words end
    while first > 0 and _WORD.match(text[first - 1]):
        first -= 1
    while last < len(text) and _WORD.match(text[last]):
        last += 1
    words = _WORD.finditer(text, first, last)
    return [each[0] for each in words if each.start() < end + is_empty and each.end() > start - is_empty]


def _num_equal(first: Iterable[str], second: Iterable[str]) -> int:
    """Return the length of the common prefix."""
    num_equal = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_equal += 1
    return num_equal
