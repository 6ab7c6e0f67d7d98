"""A progress bar for commands that replay traces."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], object] | None]:
    """Show a bar on stderr if it is a terminal and tqdm is installed, and erase it at the end, also after an error.

    Yields:
        The function that advances the bar by one; None without a bar.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=" requests", leave=False, file=sys.stderr) as bar:
        yield bar.update
