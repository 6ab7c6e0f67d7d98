"""Parsers of option values: each converts the text to a value, or raises an error that says what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

COUNTS = "Counts may have a unit: 16k is 16000, 2.56M is 2560000, and 16Ki is 16384."

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(|k|m|g|ki|mi|gi)", re.IGNORECASE)
_MAX_NUMBER = 2**50  # larger numbers are typing errors
_MAX_PROCESSORS = 10_000
_MAX_SHOWN_CHARS = 40  # of a wrong value in a message


def token_ids(text: str) -> list[int]:
    """Parse token ids, separated by commas or white space."""
    ids = []
    for item in re.split(r"\s*,\s*|\s+", text.strip()):
        try:
            ids.append(int(item))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected integers, separated by commas or spaces, got {item[:_MAX_SHOWN_CHARS]!r}"
            ) from None
    from radixkv.service.token_ids import pack_token_ids  # it imports numpy

    try:
        pack_token_ids(ids)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return ids


def name(text: str) -> str:
    """Parse text that a protobuf message can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def json_schema(text: str) -> str:
    """Parse a JSON schema, or the file of one."""
    return _text_or_file(text, _is_json, "a JSON schema")


def grammar(text: str) -> str:
    """Parse a grammar in the syntax of Lark or llama.cpp, or the file of one."""
    return _text_or_file(text, _is_grammar, "a grammar, whose rules have a colon")


def _text_or_file(text: str, is_text: Callable[[str], bool], expected: str) -> str:
    """Return the contents of the file with this name; if there is none, the text itself if it looks as expected."""
    try:
        is_file_name = bool(text) and Path(text).exists()
    except (OSError, ValueError):  # the text is too long for a file name, or has a null byte
        is_file_name = False
    if is_file_name:
        try:
            return Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise argparse.ArgumentTypeError(f"expected a file, got {text}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise argparse.ArgumentTypeError(f"expected a file with text in UTF-8, got {text}: not UTF-8") from None
    if not is_text(name(text)):
        raise argparse.ArgumentTypeError(f"expected a file or {expected}, got {_shown(text)}: no such file")
    return text


def _is_json(text: str) -> bool:
    """Return whether a text is meant to be a JSON schema; the service validates it."""
    return text.lstrip().startswith("{") or text.strip() in ("true", "false")


def _is_grammar(text: str) -> bool:
    """Return whether a text is meant to be a grammar; the service validates it."""
    return ":" in text


def _shown(text: str) -> str:
    """Return the beginning of a wrong value, for a message."""
    return repr(text[:_MAX_SHOWN_CHARS]) if text else "an empty string"


def names(text: str) -> list[str]:
    """Parse comma-separated names, without duplicates."""
    return list(dict.fromkeys(each.strip() for each in text.split(",")))


def count(text: str) -> int:
    """Parse a whole number from 0 to 2**32 - 1."""
    return _whole(text, 0, 2**32 - 1)


def points(text: str) -> int:
    """Parse a priority or an urgency, 0 to 100."""
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= 100):
        raise _wrong("0 to 100", text)
    return int(text)


def seed(text: str) -> int:
    """Parse a whole number of at most 64 bits, without a unit."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise _wrong("0 to 2**64 - 1", text)
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number from 1 to 2**31 - 1."""
    return _whole(text, 1, 2**31 - 1)


def whole(text: str) -> int:
    """Parse a whole number from 1 to 2**50, such as the tokens of a context or of a cache."""
    return _whole(text, 1, _MAX_NUMBER)


def capacities(text: str) -> list[int]:
    """Parse comma-separated numbers of tokens, without duplicates."""
    return list(dict.fromkeys(whole(item.strip()) for item in text.split(",")))


def share(text: str) -> float:
    """Parse a fraction, 0 to 1."""
    return _from_0(text, 1)


def number(text: str) -> Decimal:
    """Parse a decimal number from 0 to 2**50."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not (value.is_finite() and 0 <= value <= _MAX_NUMBER):
        raise _wrong("a number from 0", text)
    return value


def positive_number(text: str) -> float:
    """Parse a number above 0."""
    value = _float(text)
    if not (math.isfinite(value) and value > 0):
        raise _wrong("a positive number", text)
    return value


def period(text: str) -> float:
    """Parse the seconds between two updates of a display, above 0 and at most a day."""
    return _above_0(text, 86_400)


def days(text: str) -> float:
    """Parse a number of days, above 0 and at most a hundred years."""
    return _above_0(text, 36_500)


def processors(text: str) -> float:
    """Parse a number of CPUs or GPUs, 0 to 10,000."""
    return _from_0(text, _MAX_PROCESSORS)


def _from_0(text: str, maximum: int) -> float:
    value = _float(text)
    if not 0 <= value <= maximum:
        raise _wrong(f"0 to {maximum}", text)
    return value


def _above_0(text: str, maximum: int) -> float:
    value = _float(text)
    if not 0 < value <= maximum:
        raise _wrong(f"more than 0 and at most {maximum}", text)
    return value


def _float(text: str) -> float:
    """Parse a number; NaN if the text is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole(text: str, minimum: int, maximum: int) -> int:
    """Parse a whole number with an optional unit of `COUNTS`, in upper or lower case."""
    match = _COUNT.fullmatch(text)
    value = Decimal(match[1]) * _UNITS[match[2].lower()] if match else Decimal(-1)
    if not (minimum <= value <= maximum and value == int(value)):
        bounds = f"from {minimum}" if value <= maximum else f"from {minimum} to {maximum}"
        raise _wrong(f"a whole number {bounds}, such as 8192, 8k (8000) or 8Ki (8192)", text)
    return int(value)


def _wrong(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, got {text or 'an empty string'}")
