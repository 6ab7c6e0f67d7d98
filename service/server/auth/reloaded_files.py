"""A value that is read from files, and read again when the files change."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from radixkv.errors import ConfigError

PERIOD_S = 1.0  # between two checks
_MAX_INITIAL_READS = 10  # attempts to read files that change while they are read
# A check that takes longer is logged, because a mount seems not to respond.
_MAX_CHECK_S = 10.0

Value = TypeVar("Value")
_Stamp = list[tuple[int, int, int] | None]

_logger = logging.getLogger(__name__)


class ReloadedFiles(Generic[Value]):
    """The value of some files. A separate thread checks once per second whether they have changed. Thread-safe.

    `get` never touches the files, so a file system that does not respond blocks only the thread. If changed files
    cannot be used, the previous value stays valid, and the files are read again at every check until they can be used.
    The log states the reason once per change. Files that change while they are read are also read again, initially at
    once and later at the next check, because their contents may not belong together.

    The thread ends when the object is garbage.

    Args:
        name: what the files contain, for the log.
        paths: the files.
        read: reads the files. The message of a ConfigError that it raises is logged, so it must contain no secrets; for
            other exceptions only the type is logged.
        clock: a monotonic clock in seconds.
        is_watched: whether to start the thread; if not, only `check` reads changed files.

    Raises:
        ConfigError: the files cannot be read initially, or change during each of several attempts.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str | Path],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
        *,
        is_watched: bool = True,
    ) -> None:
        self._name = name
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._clock = clock
        self._last_logged: tuple[_Stamp, str] | None = None  # the last failure in the log, to log each one only once
        self._stamp, self._value = self._read_initially()
        self._check_started_s: float | None = None
        self._is_blocked = False
        if is_watched and self._paths:
            is_finalized = threading.Event()
            weakref.finalize(self, is_finalized.set)
            arguments = (weakref.ref(self), is_finalized)
            threading.Thread(target=_watch, args=arguments, name="radixkv-files", daemon=True).start()

    def get(self) -> Value:
        """Return the value that was last read successfully. Takes less than a microsecond."""
        check_started_s = self._check_started_s
        if check_started_s is not None and not self._is_blocked and self._clock() - check_started_s > _MAX_CHECK_S:
            self._is_blocked = True
            _logger.error(
                "%s: the files could not be read for %.0f s, so the previous ones stay valid; does their file system "
                "respond?",
                self._name,
                _MAX_CHECK_S,
            )
        return self._value

    def check(self) -> None:
        """Read the files if they have changed. For one thread at a time. May block on the file system."""
        self._check_started_s = self._clock()
        try:
            self._check()
        finally:
            self._check_started_s = None
            self._is_blocked = False

    def _read_initially(self) -> tuple[_Stamp, Value]:
        for _ in range(_MAX_INITIAL_READS):
            stamp = self._stamp_now()
            try:
                value = self._read()
            except Exception:
                if self._stamp_now() == stamp:
                    raise
            else:
                if self._stamp_now() == stamp:
                    return stamp, value
        raise ConfigError(f"{self._name}: the files change while they are read; start again when they are complete")

    def _check(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            value = self._read()
        except Exception as error:  # noqa: BLE001 - no file may end the thread
            self._log_failure(stamp, str(error) if isinstance(error, ConfigError) else type(error).__name__)
        else:
            if self._stamp_now() != stamp:
                return  # a certificate may have been read with the key of another; the next check reads both again
            self._value = value
            self._stamp = stamp
            _logger.info("%s: reloaded", self._name)

    def _log_failure(self, stamp: _Stamp, reason: str) -> None:
        if (stamp, reason) != self._last_logged:
            self._last_logged = (stamp, reason)
            _logger.error(
                "%s: the changed files cannot be used, so the previous ones stay valid: %s", self._name, reason
            )

    def _stamp_now(self) -> _Stamp:
        return [_file_stamp(path) for path in self._paths]


def _watch(weak_files: weakref.ref[ReloadedFiles[Any]], is_finalized: threading.Event) -> None:
    while not is_finalized.wait(PERIOD_S):
        strong_files = weak_files()
        if strong_files is not None:
            strong_files.check()
            del strong_files  # otherwise the thread would keep the object alive while it waits


def _file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file, or the target of a link, is written or replaced; None if missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
