"""Output for a terminal: tables with aligned columns, text without control characters, and progress bars."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """Return one line per row, with aligned columns.

    Args:
        rows: cells of text; a row may be shorter than others.
        is_right: right-align all columns except the first, for numbers.

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
    """Return a percentage in parentheses, to follow a number; empty if `whole` is 0.

    >>> percent(6, 8)
    ' (75.0 %)'
    """
    return f" ({100 * part / whole:.1f} %)" if whole else ""


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


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], object] | None]:
    """Show a progress bar on stderr if that is a terminal and tqdm is installed, and erase it at the end.

    Yields:
        A function that advances the bar by one; None if there is no bar.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=" requests", leave=False, file=sys.stderr) as bar:
        yield bar.update


def _printable(text: str) -> str:
    """Escape control characters in a cell: names of tenants are chosen by clients and must not control the terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
