"""Describes the pattern of what differs, such as "16 hexadecimal digits", without the text itself."""

from __future__ import annotations

import re
from itertools import zip_longest

from radixkv.api.explanation import DifferenceKind
from radixkv.explain.kinds import DATES, HEX, TIMES, TextPair, are_uuids, date_around

_DATE = re.compile("|".join(DATES))
_TIME = re.compile("|".join(TIMES))
_JSON_KEY = re.compile(r"[\"'][\w$-]+[\"']\s*:")


def pattern_of(kind: DifferenceKind, texts: TextPair | None) -> str:
    """Return the pattern of a difference, for a sentence; empty if it has none, or without text.

    Differences that the same line of a program causes have the same pattern: it does not depend on which part of an id
    or of a date differs by chance.

    Args:
        kind: what differs.
        texts: the text around the difference on both sides.

    Example:
        >>> texts = TextPair.of("id: 4f2a9c1 on", "id: b07e55d on", has_same_end=True)
        >>> pattern_of(DifferenceKind.RANDOM_ID, texts)
        '7 hexadecimal digits'
    """
    if texts is None:
        return ""
    if kind is DifferenceKind.RANDOM_ID:
        return "a UUID" if are_uuids(texts) else _id_pattern(texts)
    if kind is DifferenceKind.DATE_OR_TIME:
        return _date_pattern(texts)
    if kind is DifferenceKind.REORDERED and _JSON_KEY.search(texts.prompt, texts.start, texts.prompt_end):
        return "keys of JSON objects"
    return ""


def _id_pattern(texts: TextPair) -> str:
    pairs = zip_longest(*texts.words(), fillvalue="")
    prompt_id, branch_id = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    is_hex = HEX.fullmatch(prompt_id) and HEX.fullmatch(branch_id)
    characters = "hexadecimal digits" if is_hex else "letters and digits"
    return f"{len(prompt_id)} {characters}" if len(prompt_id) == len(branch_id) else characters


def _date_pattern(texts: TextPair) -> str:
    text = date_around(*texts.sides()[0])
    has_date, has_time = bool(_DATE.search(text)), bool(_TIME.search(text))
    if has_date and has_time:
        return "a date and a time"
    if has_time:
        return "a time"
    if has_date:
        return "a date"
    return "a Unix time" if text[:1].isdigit() else "a weekday"
