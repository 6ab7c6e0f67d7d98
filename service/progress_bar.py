"""A progress bar on stderr, drawn by tqdm."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    description: str, total: int, *, is_shown: bool | None = None, delay_s: float = 0.0, is_kept: bool = False
) -> Iterator[Callable[[], object]]:
    """Show a progress bar inside a `with` block.

    Args:
        description: text before the bar.
        total: number of requests.
        is_shown: whether to show it; None to show it if stderr is a terminal and tqdm is installed.
        delay_s: seconds after which it appears.
        is_kept: whether it remains on the screen at the end, instead of being erased.

    Yields:
        A function that advances the bar by one request.
    """
    if is_shown is None:
        is_shown = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    if not is_shown:
        yield _do_nothing
        return
    from tqdm import tqdm

    options = {"unit": " requests", "file": sys.stderr, "disable": False, "delay": delay_s, "leave": is_kept}
    with tqdm(total=total, desc=description, **options) as bar:
        yield bar.update


def _do_nothing() -> None:
    pass
