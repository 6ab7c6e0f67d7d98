"""Output for a terminal: tables with aligned columns, and text without control characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """Return one line per row, with aligned columns.

    Args:
        rows: cells of text, whose control characters are escaped; a row may be shorter than others.
        is_right: right-align all columns except the first, for numbers.

    >>> align_columns([("policy", "hits"), ("lru", "7")], is_right=True)
    ['policy  hits', 'lru        7']
    """
    printable_rows = [[printable(cell, keep="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*printable_rows, fillvalue="")]
    lines = []
    for row in printable_rows:
        cells = [
            cell.rjust(width) if is_right and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def percent(part: int, whole: int) -> str:
    """Return a percentage in parentheses, to follow a number; empty if `whole` is 0.

    >>> percent(6, 8)
    ' (75.0 %)'
    """
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def duration(seconds: float) -> str:
    """Return a time in a readable unit: `7s`, `12m`, `5h`, `3d`.

    >>> duration(59), duration(60), duration(90_000)
    ('59s', '1m', '1d')
    """
    for unit, length_s, next_s in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 86_400)):
        if seconds < next_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def printable(text: str, *, keep: str) -> str:
    """Escape control characters, except those to keep, so that text can't control the terminal.

    >>> printable("a" + chr(27) + "[2J", keep="")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each in keep or each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def excerpt(part: str | Sequence[int]) -> str:
    """Return a part of a prompt on one line: text with escaped line breaks, or token ids between spaces.

    >>> excerpt("a" + chr(10)), excerpt([1, 2])
    ('a\\\\n', ' 1 2 ')
    """
    if isinstance(part, str):
        return part.replace("\n", "\\n")
    return f" {' '.join(map(str, part))} " if part else ""


def bracketed(different: str | Sequence[int], equal: str | Sequence[int], *, is_cut: bool, max_chars: int) -> str:
    """Return one side of a difference: the part that differs in brackets, then the equal part after it.

    >>> bracketed("4f2a", " tools", is_cut=True, max_chars=3)
    '[4f2...] to'

    Args:
        different: the part that differs, as text or token ids.
        equal: what follows it on both sides.
        is_cut: whether more than `different` differs.
        max_chars: maximum length of each part.
    """
    return f"[{excerpt(different)[:max_chars]}{'...' if is_cut else ''}]{excerpt(equal)[:max_chars]}"


def tenant_label(tenant: str) -> str:
    """Return the name of a tenant; `(none)` for the empty one, whose requests name no tenant."""
    return tenant or "(none)"
