"""Decides which kind of text differs between a prompt and a cached branch: a random id, a date, an inserted part, ...

Both sides, the prompt and the branch, begin with the first token that differs. The span of a side is the tokens that
must be skipped there until both sides are equal again; a `Realignment` has the lengths of both spans.

    prompt   10: | 47 | UTC tools ...      The spans are `47` and `31`. Each of them is a part of a time,
    branch   10: | 31 | UTC tools ...      so the kind of the difference is DATE_OR_TIME.

Random ids, dates and numbers can only be recognized in the text of a span. Without a tokenizer, its tokens still show
whether it was inserted, removed, replaced or reordered.
"""

from __future__ import annotations

import re
from itertools import pairwise, zip_longest
from typing import NamedTuple

from radixkv.api.explanation import DifferenceKind
from radixkv.explain.realignment import Realignment, Tokens
from radixkv.explain.reordering import has_same_words, is_reordered

# Without text, a span of at least `_MIN_INSERTED_TOKENS` counts as inserted even if the other side has a span of up to
# `_MAX_EDGE_TOKENS`: next to an insertion, a tokenizer may split the text that both sides share into different tokens.
_MIN_INSERTED_TOKENS = 16
_MAX_EDGE_TOKENS = 2
_MIN_RETOKENIZED_CHARS = 8  # shorter texts may be equal by chance
# A date or an id is only searched for up to this distance from the difference: a regular expression that searched the
# whole text would hold the GIL for too long.
_MAX_MATCH_CHARS = 128

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?)"
_ZONE = r"(?:Z|UTC|GMT|CES?T|[ECMP][SD]T|[AaPp]\.?[Mm]\b\.?|[+-]\d\d:?\d\d)"
_DATE = "|".join(
    (
        r"\d{4}-\d\d?-\d\d?(?!\d)",
        r"\d{4}/\d\d?/\d\d?(?!\d)",
        r"\d\d?/\d\d?/(?:\d{4}|\d\d)(?!\d)",
        r"\d\d?\.\d\d?\.\d{4}(?!\d)",
        r"(?:19|20)\d{6}(?=T\d{4})",
        rf"{_MONTH}\.? {_DAY}(?:,? \d{{4}})?",
        rf"{_DAY} {_MONTH}\.?,?(?: \d{{4}})?",
        rf"{_MONTH}\.?,? \d{{4}}",
    )
)
_TIME = r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?|(?<=T)\d{6}(?:\.\d+)?|\d\d? ?[AaPp]\.?[Mm]\b"
_UNIX_TIME = r"(?<![\w.])1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\w)"
_DATE_OR_TIME = re.compile(
    rf"(?<![\w.])(?:{_WEEKDAY},? )?(?:{_DATE}|{_TIME})"  # such as "Mon, 2 March"
    rf"(?:(?:[T,]? ?(?:at )?(?:{_DATE}|{_TIME}))|(?: ?{_ZONE}))*"  # such as " at 10:30 CET"
    rf"(?:,? \d{{4}})?(?:,? \(?{_WEEKDAY}\)?)?"  # such as " 2026 (Mon)"
    rf"|{_UNIX_TIME}|{_WEEKDAY}"
)
_UUID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
_WORD = re.compile(r"[A-Za-z0-9]+")
_NON_SPACE = re.compile(r"\S*")
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_NUMBERED = re.compile(r"([A-Za-z]*)(\d+)([A-Za-z]*)")
_SHORT_HEX = re.compile(r"[a-f]\d\d+")
_JSON_KEY = re.compile(r"[\"'][\w$-]+[\"']\s*:")
# Minimum length of an id in hexadecimal digits if the ids of both sides are equally long, such as the build suffix in
# the first line of the system prompts of a coding agent.
_MIN_HEX_DIGITS = 3
_MIN_ID_CHARS = 8  # minimum length of any other id
_MIN_DISTINCT_ID_CHARS = 5  # of an id of letters and digits


class DifferingText(NamedTuple):
    """The text of one side around a difference, and the range of characters that differs from the other side.

    Attributes:
        text: text of the span, with some equal text before and after it.
        start, end: the range that differs.
    """

    text: str
    start: int
    end: int

    @property
    def different(self) -> str:
        """The part of the text that differs."""
        return self.text[self.start : self.end]

    def words(self) -> list[str]:
        """Return the words, of ASCII letters and digits, that overlap the range, or that touch it if it is empty."""
        text, start, end = self
        first, last = start, end  # the range, extended to whole words
        while first > 0 and _WORD.match(text[first - 1]):
            first -= 1
        while last < len(text) and _WORD.match(text[last]):
            last += 1
        words = _WORD.finditer(text, first, last)
        if start == end:
            return [word[0] for word in words if word.start() <= end and word.end() >= start]
        return [word[0] for word in words if word.start() < end and word.end() > start]

    def splits_word(self) -> bool:
        """Whether the range is not empty, and begins or ends inside a word."""
        text, start, end = self
        if start == end:
            return False
        begins_inside = start > 0 and text[start - 1 : start + 1].isalnum()
        ends_inside = end < len(text) and text[end - 1 : end + 1].isalnum()
        return begins_inside or ends_inside

    def match_around(self, pattern: re.Pattern[str]) -> str:
        """Return the match of a pattern that contains the whole range; empty if there is none near the range."""
        text, start, end = self
        if end - start > _MAX_MATCH_CHARS:
            return ""
        matches = pattern.finditer(text, max(0, start - _MAX_MATCH_CHARS), end + _MAX_MATCH_CHARS)
        return next((match[0] for match in matches if match.start() <= start and end <= match.end()), "")

    def date_around(self) -> str:
        """Return the date or time that contains the range, without punctuation at its end; empty if there is none."""
        end = self.start + len(self.different.rstrip(" ,.;)\n"))
        return self._replace(end=end).match_around(_DATE_OR_TIME)


class TextPair(NamedTuple):
    """The text around a difference on both sides. Up to the `start` of the ranges that differ, both texts are equal."""

    prompt: DifferingText
    branch: DifferingText

    @classmethod
    def of(cls, prompt: str, branch: str, *, has_same_end: bool) -> TextPair:
        """Return two texts with the ranges that differ.

        Args:
            prompt, branch: the texts.
            has_same_end: whether the tokens at the end of both texts are equal. If so, the ranges that differ end where
                the common end of both texts begins; otherwise they extend to the end of the texts.
        """
        start = _num_equal(prompt, branch)
        num_same = _num_equal(prompt[start:][::-1], branch[start:][::-1]) if has_same_end else 0
        return cls(*(DifferingText(text, start, len(text) - num_same) for text in (prompt, branch)))

    @property
    def is_equal(self) -> bool:
        """Whether no text differs: the spans have the same text, or are special tokens, which have none."""
        return all(each.start == each.end for each in self)

    def words(self) -> tuple[list[str], list[str]]:
        """Return the words that differ in the prompt and in the branch.

        If only one side has text that the other one has not, no word differs, so that both lists are empty. The
        exception is text inside a word: if the prompt has 123 instead of 12, these two words are returned.
        """
        if any(each.start == each.end for each in self) and not any(each.splits_word() for each in self):
            return [], []
        return self.prompt.words(), self.branch.words()

    def is_uuid(self) -> bool:
        """Whether a UUID contains the difference on both sides."""
        return all(each.match_around(_UUID) for each in self)


def kind_of(
    prompt: Tokens, branch: Tokens, realignment: Realignment | None, *, is_first: bool, texts: TextPair | None
) -> DifferenceKind:
    """Return what kind of span differs.

    Without text, only the kinds that tokens alone show are returned: FIRST_TOKEN, INSERTED, REMOVED, REORDERED,
    REPLACED and UNCLASSIFIED.

    Args:
        prompt, branch: tokens from the difference on, uint32.
        realignment: where they are equal again; None if they are not.
        is_first: whether the difference is at the beginning of the prompt.
        texts: the text around the differing spans; None without a tokenizer, or if the spans are too long.
    """
    differing_texts = None if texts is None or texts.is_equal else texts
    is_one_token = realignment is not None and max(realignment.prompt_span, realignment.branch_span) == 1
    if is_first and is_one_token and differing_texts is None:
        return DifferenceKind.FIRST_TOKEN
    kind = None if texts is None else _kind_of_text(texts, realignment)
    if kind is not None:
        return kind
    if realignment is None:
        return DifferenceKind.UNCLASSIFIED
    if is_reordered(prompt, branch, realignment):
        return DifferenceKind.REORDERED
    prompt_size, branch_size = realignment.prompt_span, realignment.branch_span
    if differing_texts is not None:
        prompt_size, branch_size = (len(each.different) for each in differing_texts)
    elif max(prompt_size, branch_size) >= _MIN_INSERTED_TOKENS:
        prompt_size, branch_size = max(0, prompt_size - _MAX_EDGE_TOKENS), max(0, branch_size - _MAX_EDGE_TOKENS)
    if not branch_size:
        return DifferenceKind.INSERTED
    return DifferenceKind.REPLACED if prompt_size else DifferenceKind.REMOVED


def pattern_of(kind: DifferenceKind, texts: TextPair | None) -> str:
    """Return the pattern of a difference, such as "16 hexadecimal digits", without the text itself.

    Differences that the same line of a program causes have the same pattern: it does not depend on which part of an id
    or of a date differs by chance.

    Args:
        kind: what differs.
        texts: the text around the difference on both sides.

    Returns:
        The pattern, as a part of a sentence; empty if the difference has none, or without text.

    Example:
        >>> texts = TextPair.of("id: 4f2a9c1 on", "id: b07e55d on", has_same_end=True)
        >>> pattern_of(DifferenceKind.RANDOM_ID, texts)
        '7 hexadecimal digits'
    """
    if texts is None:
        return ""
    if kind is DifferenceKind.RANDOM_ID:
        return "a UUID" if texts.is_uuid() else _id_pattern(texts)
    if kind is DifferenceKind.DATE_OR_TIME:
        return _date_pattern(texts.prompt.date_around())
    if kind is DifferenceKind.REORDERED and _JSON_KEY.search(*texts.prompt):
        return "keys of JSON objects"
    return ""


def _kind_of_text(texts: TextPair, realignment: Realignment | None) -> DifferenceKind | None:
    """Return the kind that can be recognized in the text; None if there is none."""
    if _is_retokenized(texts, realignment):
        return DifferenceKind.RETOKENIZED
    if realignment is None:
        texts = TextPair(*map(_first_word, texts))
    prompt, branch = texts.words()
    if not prompt and not branch:
        return None
    if texts.is_uuid():
        return DifferenceKind.RANDOM_ID
    if all(each.date_around() for each in texts):
        return DifferenceKind.DATE_OR_TIME
    pairs = [pair for pair in zip_longest(prompt, branch, fillvalue="") if pair[0] != pair[1]]
    if pairs and all(_are_numbers(*pair) for pair in pairs):
        return DifferenceKind.NUMBER
    if pairs and all(_are_numbers(*pair) or _are_ids(*pair) for pair in pairs):
        return DifferenceKind.RANDOM_ID
    if realignment is not None and len(prompt) > 1 and has_same_words(*(each.different for each in texts)):
        return DifferenceKind.REORDERED
    return None


def _is_retokenized(texts: TextPair, realignment: Realignment | None) -> bool:
    """Whether the spans have the same text, although their tokens differ."""
    if realignment is not None:
        return texts.is_equal and realignment.prompt_span > 0 and realignment.branch_span > 0
    # Without a realignment, equally many tokens were decoded on both sides, so one text may be longer than the other.
    # It suffices if the longer text begins with the shorter one, whose last character may be incomplete.
    num_chars = min(len(each.text) for each in texts)
    return num_chars >= _MIN_RETOKENIZED_CHARS and texts.prompt.start >= num_chars - 1


def _first_word(text: DifferingText) -> DifferingText:
    """Return the text with a range that ends before the first white space after its start."""
    match = _NON_SPACE.match(text.text, text.start)
    assert match is not None, "the pattern also matches an empty text"
    return text._replace(end=match.end())


def _are_numbers(first: str, second: str) -> bool:
    """Whether two words are numbers, perhaps with the same letters before or after them, such as v2 and v3."""
    first_match, second_match = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(second)
    if first_match is None or second_match is None:
        return False
    if (first_match[1], first_match[3]) != (second_match[1], second_match[3]):
        return False
    # Words such as d87 and d68, which differ in several digits, are hexadecimal ids.
    is_short_hex = _SHORT_HEX.fullmatch(first) is not None and len(first) == len(second)
    return not is_short_hex or sum(map(str.__ne__, first, second)) <= 1


def _are_ids(first: str, second: str) -> bool:
    """Whether two words look random: hexadecimal digits, or letters and digits in turn."""
    if not any(word and not word.isdigit() and not word.isalpha() for word in (first, second)):
        return False  # no word has letters and digits
    min_chars = min(len(first), len(second))
    if _HEX.fullmatch(first) and _HEX.fullmatch(second):
        return len(first) == len(second) >= _MIN_HEX_DIGITS or min_chars >= _MIN_ID_CHARS
    return min_chars >= _MIN_ID_CHARS and (_looks_random(first) or _looks_random(second))


def _looks_random(word: str) -> bool:
    """Whether a word of several different characters changes at least twice between letters and digits."""
    num_changes = sum(first.isdigit() != second.isdigit() for first, second in pairwise(word))
    return num_changes >= 2 and len(set(word)) >= _MIN_DISTINCT_ID_CHARS


def _id_pattern(texts: TextPair) -> str:
    pairs = zip_longest(*texts.words(), fillvalue="")
    prompt_id, branch_id = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    is_hex = _HEX.fullmatch(prompt_id) and _HEX.fullmatch(branch_id)
    characters = "hexadecimal digits" if is_hex else "letters and digits"
    return f"{len(prompt_id)} {characters}" if len(prompt_id) == len(branch_id) else characters


def _date_pattern(date_or_time: str) -> str:
    has_date, has_time = re.search(_DATE, date_or_time), re.search(_TIME, date_or_time)
    if has_date and has_time:
        return "a date and a time"
    if has_time:
        return "a time"
    if has_date:
        return "a date"
    return "a Unix time" if date_or_time[:1].isdigit() else "a weekday"


def _num_equal(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
