"""A value that is read from files again when they change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from radixkv.errors import ConfigError

PERIOD_S = 1.0

Value = TypeVar("Value")
_Stamp = list[tuple[int, int, int] | None]

_logger = logging.getLogger(__name__)


class ReloadedFiles(Generic[Value]):
    """The value of some files as they are now, or were at most a second ago. From any thread.

    Files that can't be used, for whatever reason, leave the value as it was. They are read again at each look until
    they can be; the log says once a change what is wrong with them.

    Args:
        what: the value's name, for the log.
        paths: the files.
        read: reads them. A ConfigError that it raises has no secrets in its message; other errors may have.
        clock: seconds that only grow.

    Raises:
        ConfigError: the files can't be read now.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[str | Path],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._told: tuple[_Stamp, str] | None = None  # of the last failure
        self._stamp = self._stamp_now()  # before reading: a change meanwhile is read again
        self._value = read()
        self._next_look_s = clock() + PERIOD_S

    def get(self) -> Value:
        """Return the value. Looks at the files at most once in `PERIOD_S`, and reads them only if they changed."""
        if self._clock() >= self._next_look_s and self._lock.acquire(blocking=False):
            try:
                self._next_look_s = self._clock() + PERIOD_S
                self._look()
            finally:
                self._lock.release()
        return self._value

    def _look(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            self._value = self._read()
        except Exception as error:  # noqa: BLE001 - a call that happens to look must not end by what is in a file
            self._tell(stamp, str(error) if isinstance(error, ConfigError) else type(error).__name__)
        else:
            self._stamp = stamp
            _logger.info("%s: read again", self._what)

    def _tell(self, stamp: _Stamp, reason: str) -> None:
        if (stamp, reason) != self._told:
            self._told = stamp, reason
            _logger.error("%s: kept as they were, since the changed files can't be used: %s", self._what, reason)

    def _stamp_now(self) -> _Stamp:
        return [_stamp_of(path) for path in self._paths]


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced, also behind a link; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
