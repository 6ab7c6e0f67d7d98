"""What the arguments of `radixkv` may be: each reads the text of one, or says what was expected."""

from __future__ import annotations

import argparse
from decimal import Decimal

from radixkv.service.token_ids import pack_token_ids


def token_ids(text: str) -> list[int]:
    """Token ids with commas between."""
    try:
        token_ids = [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("expected integers with commas between") from None
    try:
        pack_token_ids(token_ids)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return token_ids


def name(text: str) -> str:
    """Text that a message can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def count(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text}")
    return int(text)


def seed(text: str) -> int:
    """A whole number of at most 64 bits."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**64):
        raise argparse.ArgumentTypeError(f"expected 0 to 2**64 - 1, got {text}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return int(text)


def names(text: str) -> list[str]:
    """Names with commas between, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def capacities(text: str) -> list[int]:
    """Numbers of tokens with commas between, each once."""
    return list(dict.fromkeys(_tokens(item.strip()) for item in text.split(",")))


def _tokens(text: str) -> int:
    """A number of tokens as people write it: `2560000`, `2.56M`, `64k`."""
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    try:
        tokens = Decimal(text if factor == 1 else text[:-1]) * factor
        if tokens == int(tokens) and 1 <= tokens < 2**63:
            return int(tokens)
    except (ArithmeticError, ValueError):  # no number, or an infinite one
        pass
    raise argparse.ArgumentTypeError(f"expected a number of tokens from 1, like 2560000 or 2.56M, got {text or 'none'}")
