"""Tables for a terminal: cells in aligned columns, safe to print."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """Return a line for each row, its columns as wide as their widest cell.

    Args:
        rows: cells of text; a row may be shorter than others.
        is_right: align all columns but the first to the right, as numbers are read.

    >>> aligned([("policy", "hits"), ("lru", "7")], is_right=True)
    ['policy  hits', 'lru        7']
    """
    safe = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*safe, fillvalue="")]
    return [
        "  ".join(
            cell.rjust(width) if is_right and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in safe
    ]


def percent(part: int, whole: int) -> str:
    """Return a share in parentheses, to stand behind a number; nothing where there is no whole.

    >>> percent(6, 8)
    ' (75.0 %)'
    """
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def printable(text: str, *, keep: str) -> str:
    """Escape the control characters of a text, except those to keep: a terminal would obey them.

    >>> printable("a" + chr(27) + "[2J", keep="")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each in keep or each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _printable(text: str) -> str:
    """Escape control characters: callers choose the names of tenants, and a terminal would obey what is in them."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
