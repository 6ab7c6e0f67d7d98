"""A progress bar for commands that replay traces."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable


def progress_bar(what: str, total: int) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    """Show a bar on a terminal's stderr; nothing elsewhere, or without tqdm. Returns how to move it and to end it."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None, lambda: None
    from tqdm import tqdm

    bar = tqdm(total=total, desc=what, unit=" requests", leave=False, file=sys.stderr)
    return bar.update, bar.close
