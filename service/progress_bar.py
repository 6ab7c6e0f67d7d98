"""A progress bar on stderr, drawn by tqdm."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    description: str, total: int, *, wanted: bool | None = None, delay_s: float = 0.0, stays: bool = False
) -> Iterator[Callable[[], object]]:
    """Show a progress bar for the time of a block.

    Args:
        description: what is done with the requests.
        total: number of requests.
        wanted: whether to show it; None to show it if stderr is a terminal and tqdm is installed.
        delay_s: seconds after which it appears.
        stays: whether it stays at the end, instead of being erased.

    Yields:
        A function that advances the bar by one request.
    """
    if wanted is None:
        wanted = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    if not wanted:
        yield _do_nothing
        return
    from tqdm import tqdm

    options = {"unit": " requests", "file": sys.stderr, "disable": False, "delay": delay_s, "leave": stays}
    with tqdm(total=total, desc=description, **options) as bar:
        yield bar.update


def _do_nothing() -> None:
    pass
