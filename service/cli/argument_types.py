"""Types of the arguments of `radixkv`: each function reads the text of one argument, or says what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

from radixkv.service.token_ids import pack_token_ids

COUNTS = "Counts may have a unit: 16k is 16000, 2.56M is 2560000, and 16Ki is 16384."

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(|k|m|g|ki|mi|gi)", re.IGNORECASE)
_MOST = 2**50  # larger numbers are typing errors
_MOST_PROCESSORS = 10_000
_MOST_SHOWN = 40  # characters of what came, which may be a file


def token_ids(text: str) -> list[int]:
    """Read token ids, separated by commas or white space."""
    token_ids = []
    for item in re.split(r"\s*,\s*|\s+", text.strip()):
        try:
            token_ids.append(int(item))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected integers, separated by commas or spaces, got {item[:_MOST_SHOWN]!r}"
            ) from None
    try:
        pack_token_ids(token_ids)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return token_ids


def name(text: str) -> str:
    """Read text that a message can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def json_schema(text: str) -> str:
    """Read a JSON schema, or the file of one."""
    return _text_or_file(text, _is_json, "a JSON schema")


def grammar(text: str) -> str:
    """Read a grammar in the syntax of Lark or llama.cpp, or the file of one."""
    return _text_or_file(text, lambda text: ":" in text, "a grammar, whose rules have a colon")


def _text_or_file(text: str, is_text: Callable[[str], bool], expected: str) -> str:
    """Read the file of this name, or else return the text if it looks like what is expected."""
    try:
        is_there = bool(text) and Path(text).exists()
    except (OSError, ValueError):  # the text is too long for a name, or has a zero byte
        is_there = False
    if is_there:
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
    """Whether a text is JSON, or is meant to be: the service says what is wrong with it."""
    return text.lstrip().startswith("{") or text.strip() in ("true", "false")


def _shown(text: str) -> str:
    """Return the beginning of what came, for a message."""
    return repr(text[:_MOST_SHOWN]) if text else "an empty string"


def names(text: str) -> list[str]:
    """Read names with commas between, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def count(text: str) -> int:
    """Read a whole number from 0 that fits into 32 bits."""
    return _whole(text, 0, 2**32 - 1)


def points(text: str) -> int:
    """Read a priority or an urgency, 0 to 100."""
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= 100):
        raise argparse.ArgumentTypeError(f"expected 0 to 100, got {text or 'an empty string'}")
    return int(text)


def seed(text: str) -> int:
    """Read a whole number of at most 64 bits, without a unit."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise argparse.ArgumentTypeError(f"expected 0 to 2**64 - 1, got {text or 'an empty string'}")
    return int(text)


def positive(text: str) -> int:
    """Read a whole number from 1 that fits into 31 bits."""
    return _whole(text, 1, 2**31 - 1)


def whole(text: str) -> int:
    """Read a whole number from 1, such as the tokens of a context or of a cache."""
    return _whole(text, 1, _MOST)


def capacities(text: str) -> list[int]:
    """Read numbers of tokens with commas between, each once."""
    return list(dict.fromkeys(whole(item.strip()) for item in text.split(",")))


def share(text: str) -> float:
    """Read a part of a whole, 0 to 1."""
    value = _float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {text or 'an empty string'}")
    return value


def number(text: str) -> Decimal:
    """Read a number from 0; it need not be whole."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not (value.is_finite() and 0 <= value <= _MOST):
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text or 'an empty string'}")
    return value


def positive_number(text: str) -> float:
    """Read a number above 0; it need not be whole."""
    value = _float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text or 'an empty string'}")
    return value


def period(text: str) -> float:
    """Read the seconds between two screens, above 0; a day at most."""
    return _above_0(text, 86_400)


def days(text: str) -> float:
    """Read a number of days above 0; a hundred years at most, since dates end with the year 9999."""
    return _above_0(text, 36_500)


def processors(text: str) -> float:
    """Read a number of CPUs or GPUs from 0; it need not be whole."""
    value = _float(text)
    if not 0 <= value <= _MOST_PROCESSORS:
        raise argparse.ArgumentTypeError(f"expected 0 to {_MOST_PROCESSORS}, got {text or 'an empty string'}")
    return value


def _above_0(text: str, most: int) -> float:
    value = _float(text)
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most {most}, got {text or 'an empty string'}")
    return value


def _float(text: str) -> float:
    """Read a number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole(text: str, least: int, most: int) -> int:
    """Read a whole number with or without a unit; the units are those of `COUNTS`, in upper or lower case."""
    match = _COUNT.fullmatch(text)
    value = Decimal(match[1]) * _UNITS[match[2].lower()] if match else Decimal(-1)
    if not (least <= value <= most and value == int(value)):
        bounds = f"from {least}" if value <= most else f"from {least} to {most}"
        examples = "8192, 8k (8000) or 8Ki (8192)"
        got = text or "an empty string"
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, such as {examples}, got {got}")
    return int(value)
