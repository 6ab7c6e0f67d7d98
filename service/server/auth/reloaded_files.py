"""A value that is read from files, and read again when the files change."""

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
    """The value of some files, at most one second old. Thread-safe.

    If changed files cannot be used, the previous value stays valid. They are read again at every check until they can
    be used; the log states the reason once per change.

    Args:
        what: name of the value, for the log.
        paths: the files.
        read: reads them. Messages of the ConfigError it raises have no secrets; those of other exceptions may.
        clock: a monotonic clock in seconds.

    Raises:
        ConfigError: the files cannot be read initially.
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
        self._logged: tuple[_Stamp, str] | None = None  # the last failure
        self._stamp = self._stamp_now()  # taken before reading, so that a concurrent change is read again
        self._value = read()
        self._next_check_s = clock() + PERIOD_S

    def get(self) -> Value:
        """Return the value. Checks the files at most once per `PERIOD_S`, and reads them only if they have changed."""
        if self._clock() >= self._next_check_s and self._lock.acquire(blocking=False):
            try:
                self._next_check_s = self._clock() + PERIOD_S
                self._check()
            finally:
                self._lock.release()
        return self._value

    def _check(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            self._value = self._read()
        except Exception as error:  # noqa: BLE001 - the call that happens to check must not fail because of a file
            self._log(stamp, str(error) if isinstance(error, ConfigError) else type(error).__name__)
        else:
            self._stamp = stamp
            _logger.info("%s: reloaded", self._what)

    def _log(self, stamp: _Stamp, reason: str) -> None:
        if (stamp, reason) != self._logged:
            self._logged = (stamp, reason)
            _logger.error(
                "%s: the changed files cannot be used, so the previous ones stay valid: %s", self._what, reason
            )

    def _stamp_now(self) -> _Stamp:
        return [_stamp_of(path) for path in self._paths]


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file, or the target of a link, is written or replaced; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
