"""Progress of a long run on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

LINE_INTERVAL_S = 5.0


@contextlib.contextmanager
def progress(
    label: str,
    total: int,
    stream: TextIO,
    *,
    limit_s: float | None = None,
    use_lines: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[], object]]:
    """Show how many of `total` requests have been answered.

    Args:
        label: description of the requests.
        total: number of requests.
        stream: where to write. A terminal gets a bar.
        limit_s: time after which no request is sent; it is shown. None for no limit.
        use_lines: whether to write lines if `stream` is not a terminal: at the start, at the end, and in between at
            most one per `LINE_INTERVAL_S`.
        clock: seconds.

    Yields:
        A function to call after each answer.
    """
    if limit_s is not None:
        label = f"{label}, at most {limit_s:.0f} s"
    if stream.isatty():
        with tqdm(total=total, desc=label, unit="req", file=stream, dynamic_ncols=True, disable=None) as bar:
            yield bar.update
        return
    if not use_lines:
        yield lambda: None
        return
    lines = _ProgressLines(label, total, stream, clock)
    yield lines.advance
    lines.write()


class _ProgressLines:
    """Writes a line at the start, and another one when an answer arrives after the interval."""

    def __init__(self, label: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._clock = clock
        self._num_answered = 0
        self._start_s = clock()
        self.write()

    def advance(self) -> None:
        """Count one answer."""
        self._num_answered += 1
        if self._clock() - self._written_s >= LINE_INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Write a line now."""
        self._written_s = self._clock()
        elapsed_s = self._written_s - self._start_s
        text = f"{self._label}: {self._num_answered:,} of {self._total:,} requests, {elapsed_s:.0f} s"
        print(text, file=self._stream, flush=True)
