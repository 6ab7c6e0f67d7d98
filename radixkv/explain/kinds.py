"""Decides what kind of span differs between a prompt and a cached branch, by their tokens and, if known, their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.api.explanation import DifferenceKind
from radixkv.explain.realignment import MIN_EQUAL_TOKENS, Realignment, Tokens, num_equal_tokens, realign, window_hashes

_MIN_REORDERED_TOKENS = 8  # shorter spans are never in another order
_REORDERED_SHARE = 0.9  # minimum share of the longer span's tokens that both spans have
_GRAM_TOKENS = 8  # length of the windows of a span that are searched on the other side
_MOVED_SHARE = 0.8  # minimum share of these windows that the other side has
_MAX_MOVED_TOKENS = 16_384  # tokens of each side that are searched for moved parts
_MAX_SHIFT_TOKENS = 16  # maximum difference in length if the same text is tokenized differently
_MAX_ENDS = 64  # positions that are examined as ends of spans whose parts are in another order
_REPLACED_FACTOR = 4  # a span is short if it is followed by equal tokens of at least this many times its length
_MIN_SEARCHED_TOKENS = 5  # shorter spans may occur on the other side by chance
_MAX_READ_TOKENS = 4096  # tokens of each side whose words are compared
# Two spans count as the same text, split into other tokens, if at most this share of their tokens is in only one span.
_MAX_RESPLIT_SHARE = 0.06
# Tokens at both edges of an inserted span of at least this length do not count, because a tokenizer may split the text
# that both sides share into other tokens there.
_MIN_INSERTED_TOKENS = 16
_NUM_EDGE_TOKENS = 2
_MIN_RETOKENIZED_CHARS = 8
# Dates, times and ids are searched up to this distance from a difference. A regular expression that searched a whole
# text would hold the GIL for too long.
_MAX_MATCH_CHARS = 128

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?)"
_ZONE = r"(?:Z|UTC|GMT|CES?T|[ECMP][SD]T|[AaPp]\.?[Mm]\b\.?|[+-]\d\d:?\d\d)"
DATES = (
    r"\d{4}-\d\d?-\d\d?(?!\d)",
    r"\d{4}/\d\d?/\d\d?(?!\d)",
    r"\d\d?/\d\d?/(?:\d{4}|\d\d)(?!\d)",
    r"\d\d?\.\d\d?\.\d{4}(?!\d)",
    r"(?:19|20)\d{6}(?=T\d{4})",
    rf"{_MONTH}\.? {_DAY}(?:,? \d{{4}})?",
    rf"{_DAY} {_MONTH}\.?,?(?: \d{{4}})?",
    rf"{_MONTH}\.?,? \d{{4}}",
)
TIMES = (r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?", r"(?<=T)\d{6}(?:\.\d+)?", r"\d\d? ?[AaPp]\.?[Mm]\b")
_UNIX_TIME = r"(?<![\w.])1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\w)"
# A date or a time, which may be a part of a date with a time.
_DATE_PART = "|".join((*DATES, *TIMES))
_DATE_OR_TIME = re.compile(
    rf"(?<![\w.])(?:{_WEEKDAY},? )?(?:{_DATE_PART})"  # such as "Mon, 2 March"
    rf"(?:(?:[T,]? ?(?:at )?(?:{_DATE_PART}))|(?: ?{_ZONE}))*"  # such as " at 10:30 CET"
    rf"(?:,? \d{{4}})?(?:,? \(?{_WEEKDAY}\)?)?"  # such as " 2026 (Mon)"
    rf"|{_UNIX_TIME}|{_WEEKDAY}"
)
_UUID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
_WORD = re.compile(r"[A-Za-z0-9]+")
_ANY_WORD = re.compile(r"\w+")
HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_NUMBERED = re.compile(r"([A-Za-z]*)(\d+)([A-Za-z]*)")
_SHORT_HEX = re.compile(r"[a-f]\d\d+")
# Minimum length of an id in hexadecimal digits if both sides have equally many digits, such as the build suffix in the
# first line of the system prompts of a coding agent.
_MIN_HEX_DIGITS = 3
_MIN_ID_CHARS = 8  # minimum length of any other id
_MIN_DISTINCT_ID_CHARS = 5  # of an id of letters and digits


class TextPair(NamedTuple):
    """The text around a difference on both sides, and the range of characters that differs.

    Attributes:
        prompt, branch: text of the differing spans with some equal text before and after.
        start: number of characters at the beginning that both texts have in common.
        prompt_end, branch_end: where the common end of both texts begins.
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
            has_same_end: whether the texts end where the tokens are equal again; if not, everything after the first
                different character counts as different.
        """
        start = _num_equal(prompt, branch)
        num_same = _num_equal(reversed(prompt[start:]), reversed(branch[start:])) if has_same_end else 0
        return cls(prompt, branch, start, len(prompt) - num_same, len(branch) - num_same)

    def sides(self) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
        """Return each text with the range that differs."""
        return (self.prompt, self.start, self.prompt_end), (self.branch, self.start, self.branch_end)

    def words(self) -> tuple[list[str], list[str]]:
        """Return the words, of ASCII letters and digits, that differ in the prompt and in the branch.

        If one side has an empty range, both lists are empty, unless the range of the other side is a part of a word,
        such as a digit of a number.
        """
        sides = self.sides()
        if any(start == end for _, start, end in sides) and not any(_is_in_word(*side) for side in sides):
            return [], []
        return _words(*sides[0]), _words(*sides[1])


def kind_of(
    prompt: Tokens, branch: Tokens, place: Realignment | None, *, is_first: bool, texts: TextPair | None
) -> DifferenceKind:
    """Return what kind of span differs.

    Without text, only the kinds that tokens alone show are returned: FIRST_TOKEN, INSERTED, REMOVED, REORDERED,
    REPLACED and UNCLASSIFIED.

    Args:
        prompt, branch: tokens from the difference on, uint32.
        place: where they are equal again; None if they are not.
        is_first: whether the difference is at the beginning of the prompt.
        texts: the text around the differing spans; None without a tokenizer, or if the spans are too long.
    """
    if is_first and place is not None and max(place.prompt_span, place.branch_span) == 1 and _is_without_text(texts):
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
        # Next to an inserted span, a tokenizer may split the text that both sides share into other tokens.
        prompt_size, branch_size = max(0, prompt_size - _NUM_EDGE_TOKENS), max(0, branch_size - _NUM_EDGE_TOKENS)
    if not branch_size:
        return DifferenceKind.INSERTED
    return DifferenceKind.REPLACED if prompt_size else DifferenceKind.REMOVED


def _is_without_text(texts: TextPair | None) -> bool:
    """Whether the differing spans are special tokens, which have no text, or no text is known."""
    return texts is None or (texts.prompt_end <= texts.start and texts.branch_end <= texts.start)


def _kind_of_text(texts: TextPair, place: Realignment | None) -> DifferenceKind | None:
    """Return the kind that can be recognized by the text; None if there is none."""
    if _is_retokenized(texts, place):
        return DifferenceKind.RETOKENIZED
    if place is None:
        texts = _first_words(texts)
    prompt, branch = texts.words()
    if not prompt and not branch:
        return None
    if are_uuids(texts):
        return DifferenceKind.RANDOM_ID
    if all(_is_date_or_time(*side) for side in texts.sides()):
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
        has_same_text = texts.prompt_end <= texts.start and texts.branch_end <= texts.start
        return has_same_text and place.prompt_span > 0 and place.branch_span > 0
    # The same number of tokens was decoded on both sides. The texts count as equal if the shorter one is a prefix of
    # the longer one, apart from its last character, which may be incomplete.
    num_chars = min(len(texts.prompt), len(texts.branch))
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


def are_uuids(texts: TextPair) -> bool:
    """Whether a UUID contains the difference on both sides."""
    return all(_match_around(_UUID, *side) for side in texts.sides())


def _match_around(pattern: re.Pattern[str], text: str, start: int, end: int) -> str:
    """Return the match of a pattern that contains a range, and begins and ends near it, if any. Complexity: O(1)."""
    if end - start > _MAX_MATCH_CHARS:
        return ""
    matches = pattern.finditer(text, max(0, start - _MAX_MATCH_CHARS), end + _MAX_MATCH_CHARS)
    return next((match[0] for match in matches if match.start() <= start and end <= match.end()), "")


def _is_date_or_time(text: str, start: int, end: int) -> bool:
    return bool(date_around(text, start, end))


def date_around(text: str, start: int, end: int) -> str:
    """Return the date or the time that contains the range, apart from spaces and punctuation at its ends, if any."""
    while end > start and text[end - 1] in " ,.;)\n":
        end -= 1
    return _match_around(_DATE_OR_TIME, text, start, end)


def _are_numbers(first: str, second: str) -> bool:
    """Whether two words are numbers, perhaps with the same letters before or after them."""
    first_match, second_match = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(second)
    if _SHORT_HEX.fullmatch(first) and len(first) == len(second):
        num_differing_chars = sum(map(str.__ne__, first, second))
        if num_differing_chars > 1:
            return False  # such as the hexadecimal ids d87 and d68
    if first_match is None or second_match is None:
        return False
    return (first_match[1], first_match[3]) == (second_match[1], second_match[3])


def _are_ids(first: str, second: str) -> bool:
    """Whether two words look random: hexadecimal digits, or letters and digits in turn."""
    is_any_mixed = any(word.isalnum() and not word.isdigit() and not word.isalpha() for word in (first, second))
    if not is_any_mixed:
        return False
    if HEX.fullmatch(first) and HEX.fullmatch(second):
        return len(first) == len(second) >= _MIN_HEX_DIGITS or min(len(first), len(second)) >= _MIN_ID_CHARS
    return min(len(first), len(second)) >= _MIN_ID_CHARS and (_looks_random(first) or _looks_random(second))


def _looks_random(word: str) -> bool:
    """Whether a word of several different characters changes at least twice between letters and digits."""
    num_changes = sum(first.isdigit() != second.isdigit() for first, second in pairwise(word))
    return num_changes >= 2 and len(set(word)) >= _MIN_DISTINCT_ID_CHARS


def _is_permutation(texts: TextPair) -> bool:
    """Whether the differing texts have the same words in another order."""
    first = _ANY_WORD.findall(texts.prompt[texts.start : texts.prompt_end])
    second = _ANY_WORD.findall(texts.branch[texts.start : texts.branch_end])
    return len(first) > 1 and first != second and sorted(first) == sorted(second)


def is_reordered(prompt: Tokens, branch: Tokens, place: Realignment) -> bool:
    """Whether the differing spans have the same content in another order.

    This is so if both spans have the same tokens, or if most of the span of one side occurs later on the other side, at
    least as often as on its own side.
    """
    if has_same_tokens(prompt[: place.prompt_span], branch[: place.branch_span]):
        return True
    return _is_moved(prompt[: place.prompt_span], prompt, branch[place.branch_span :]) or _is_moved(
        branch[: place.branch_span], branch, prompt[place.prompt_span :]
    )


def end_of_permutation(prompt: Tokens, branch: Tokens, place: Realignment) -> Realignment:
    """Return the end of spans that have the same tokens in another order; `place` if there is no such end.

    The spans that `realign` returns may end within the reordered parts: a moved part after them would then count as a
    second difference. After all moved parts, both sides have the same length again.
    """
    length = min(prompt.size, branch.size)
    starts = _run_starts(prompt[:length] == branch[:length])
    if not starts:
        return place
    span = starts[0]
    if not has_same_tokens(prompt[:span], branch[:span]):
        return place
    return Realignment(span, span, num_equal_tokens(prompt[span:], branch[span:]))


def end_of_reordering(
    prompt: Tokens, branch: Tokens, place: Realignment, text_of: Callable[[Sequence[int]], str] | None = None
) -> Realignment:
    """Return the end of spans that have the same parts in another order; `place` if there are no such spans.

    Parts may have equal tokens at equal positions by chance, such as two JSON objects with the same keys. Therefore
    `place` may lie inside the reordered parts. They end at the first position up to which both sides have almost the
    same tokens, in any order. A few tokens may differ, and one span may be slightly longer than the other, because the
    same text can be tokenized differently. Without such a position, `end_of_permutation` decides.

    A passage that was replaced by another one is no reordering: then `place` is returned.

    Args:
        prompt, branch: tokens from the difference on.
        place: where both sides are equal again, as `realign` returns it.
        text_of: returns the text of token ids from the difference on. The same words in another order count as moved,
            even if they are split into other tokens. None without a tokenizer.
    """
    permutation = end_of_permutation(prompt, branch, place)
    has_unequal_spans = place.prompt_span != place.branch_span
    if (not has_unequal_spans and permutation == place) or _is_replaced(prompt, branch, place):
        return place
    ends = _ends_of_reordering(prompt, branch)
    if permutation != place:
        prompt_span, branch_span, _ = permutation
        num_unshared = _num_unshared(prompt[:prompt_span], branch[:branch_span])
        ends.append(_ReorderingEnd(num_unshared, prompt_span, branch_span))
    if not ends:
        return place

    # If no more tokens are equal after an end than the span before it has, they may be equal by chance. Then a later
    # end is better if a smaller share of the tokens before it is unshared.
    end = min(ends)  # the one with the fewest unshared tokens, and the shortest of these
    while (num_equal := num_equal_tokens(prompt[end.prompt_end :], branch[end.branch_end :])) <= end.prompt_end:
        later_ends = [
            each for each in ends if each.prompt_end > end.prompt_end and each.unshared_share < end.unshared_share
        ]
        if not later_ends:
            break
        end = min(later_ends, key=lambda each: each.unshared_share)
    best = Realignment(end.prompt_end, end.branch_end, num_equal)

    # The reordering explains the differences if only few of the differing tokens are unshared.
    num_different = _num_different(prompt, branch, place, best)
    max_unshared = num_different // 8 + min(num_different // 4, _GRAM_TOKENS)
    if not has_unequal_spans or end.num_unshared <= max_unshared:
        return best
    is_too_long = max(end.prompt_end, end.branch_end) > _MAX_READ_TOKENS
    if text_of is None or end.num_unshared > num_different or is_too_long:
        return place
    prompt_words = _ANY_WORD.findall(text_of(prompt[: end.prompt_end + _GRAM_TOKENS].tolist()))
    branch_words = _ANY_WORD.findall(text_of(branch[: end.branch_end + _GRAM_TOKENS].tolist()))
    is_permuted = prompt_words != branch_words and sorted(prompt_words) == sorted(branch_words)
    return best if is_permuted else place


def _is_replaced(prompt: Tokens, branch: Tokens, place: Realignment) -> bool:
    """Whether short spans have other tokens, such as two ids, even if parts after them are in another order."""
    prompt_span, branch_span, num_equal = place
    if not min(prompt_span, branch_span) or num_equal < _REPLACED_FACTOR * max(prompt_span, branch_span):
        return False
    # A span that occurs on the other side was moved. Its first and last token may be split differently there.
    for own_side, span, other_side in ((prompt, prompt_span, branch), (branch, branch_span, prompt)):
        if span >= _MIN_SEARCHED_TOKENS and _occurs_in(own_side[1 : span - 1], other_side[:_MAX_MOVED_TOKENS]):
            return False
    return True


def _occurs_in(passage: Tokens, tokens: Tokens) -> bool:
    """Whether a passage occurs in a run of tokens."""
    haystack, needle, position = tokens.tobytes(), passage.tobytes(), -1
    while (position := haystack.find(needle, position + 1)) >= 0:
        if position % tokens.itemsize == 0:
            return True
    return False


class _ReorderingEnd(NamedTuple):
    """The end of a span of the prompt and a span of the branch that have almost the same tokens.

    Attributes:
        num_unshared: tokens that only one of both spans has.
        prompt_end, branch_end: lengths of the spans in tokens.
    """

    num_unshared: int
    prompt_end: int
    branch_end: int

    @property
    def unshared_share(self) -> float:
        """Unshared tokens per token of the prompt's span."""
        return self.num_unshared / self.prompt_end


def _ends_of_reordering(prompt: Tokens, branch: Tokens) -> list[_ReorderingEnd]:
    """Return where runs of equal tokens begin, as far as both sides have almost the same tokens before them."""
    ends = []
    num_more_ends = _MAX_ENDS
    for shift in sorted(range(-_MAX_SHIFT_TOKENS, _MAX_SHIFT_TOKENS + 1), key=abs):
        prompt_offset, branch_offset = max(0, -shift), max(0, shift)
        length = min(prompt.size - prompt_offset, branch.size - branch_offset, _MAX_MOVED_TOKENS)
        is_equal = prompt[prompt_offset : prompt_offset + length] == branch[branch_offset : branch_offset + length]
        starts = [start for start in _run_starts(is_equal) if start >= _MIN_REORDERED_TOKENS]
        for start in starts[:num_more_ends]:
            prompt_end, branch_end = prompt_offset + start, branch_offset + start
            num_more_ends -= 1
            num_unshared = _num_unshared(prompt[:prompt_end], branch[:branch_end])
            if num_unshared <= _MAX_RESPLIT_SHARE * (prompt_end + branch_end):
                ends.append(_ReorderingEnd(num_unshared, prompt_end, branch_end))
    return ends


def _num_different(prompt: Tokens, branch: Tokens, place: Realignment, end: Realignment) -> int:
    """Return how many tokens are in differing spans up to an end; the longer side of each span counts."""
    num_different = max(place.prompt_span, place.branch_span)
    prompt_position = place.prompt_span + place.equal_tokens
    branch_position = place.branch_span + place.equal_tokens
    for _ in range(_MAX_ENDS):
        following = realign(prompt[prompt_position : end.prompt_span], branch[branch_position : end.branch_span])
        if following is None:
            return num_different + max(0, end.prompt_span - prompt_position, end.branch_span - branch_position)
        num_different += max(following.prompt_span, following.branch_span)
        prompt_position += following.prompt_span + following.equal_tokens
        branch_position += following.branch_span + following.equal_tokens
    return num_different


def _num_unshared(first: Tokens, second: Tokens) -> int:
    """Return how many tokens only one of both sides has."""
    return first.size + second.size - 2 * _num_common(first, second)


def _run_starts(is_equal: npt.NDArray[np.bool_]) -> list[int]:
    """Return where runs of at least `MIN_EQUAL_TOKENS` equal tokens begin."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_equal, [False]))))
    starts, ends = edges[::2], edges[1::2]
    long_starts: list[int] = starts[ends - starts >= MIN_EQUAL_TOKENS].tolist()
    return long_starts


def has_same_tokens(first: Tokens, second: Tokens) -> bool:
    """Whether almost the same tokens occur equally often on both sides, and neither side is too short to tell."""
    shorter, longer = sorted((first.size, second.size))
    if shorter < max(_MIN_REORDERED_TOKENS, _REORDERED_SHARE * longer):
        return False
    return _num_common(first, second) >= _REORDERED_SHARE * longer


def _num_common(first: Tokens, second: Tokens) -> int:
    """Return the size of the multiset intersection of both sides. NumPy sorts the tokens without the GIL."""
    ids, counts = np.unique(first, return_counts=True)
    other_ids, other_counts = np.unique(second, return_counts=True)
    _, at, other_at = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[at], other_counts[other_at]).sum())


def _is_moved(span: Tokens, own_side: Tokens, other_side: Tokens) -> bool:
    """Whether most of a span is found on the other side, as often as on its own side."""
    if span.size < 2 * _GRAM_TOKENS:
        return False
    grams = np.unique(window_hashes(span[:_MAX_MOVED_TOKENS], _GRAM_TOKENS))
    own_counts, other_counts = (_gram_counts(grams, side[:_MAX_MOVED_TOKENS]) for side in (own_side, other_side))
    return int((other_counts >= own_counts).sum()) >= _MOVED_SHARE * grams.size


def _gram_counts(grams: npt.NDArray[np.uint64], tokens: Tokens) -> npt.NDArray[np.intp]:
    """Return how often each gram occurs in a run of tokens. Grams are given by their hashes."""
    hashes = np.sort(window_hashes(tokens, _GRAM_TOKENS))
    return np.searchsorted(hashes, grams, "right") - np.searchsorted(hashes, grams, "left")


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
    first, last = start, end  # the searched range, extended to whole words
    while first > 0 and _WORD.match(text[first - 1]):
        first -= 1
    while last < len(text) and _WORD.match(text[last]):
        last += 1
    words = _WORD.finditer(text, first, last)
    if is_empty:
        return [word[0] for word in words if word.start() <= end and word.end() >= start]
    return [word[0] for word in words if word.start() < end and word.end() > start]


def _num_equal(first: Iterable[str], second: Iterable[str]) -> int:
    """Return the length of the common prefix of two sequences of characters."""
    num_equal = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_equal += 1
    return num_equal
