"""A directory with a file for each day of what tenants used."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from radixkv.api.statement import MAX_DAYS, DayUse, Use, day_name, day_number
from radixkv.durable_file import replace_file
from radixkv.errors import ConfigError, StoreUnavailable

_log = logging.getLogger(__name__)
_FORMAT = 1
_LOCK = "lock"
_MAX_REPLICAS = 1000


class DayFiles:
    """What tenants used, in a file for each day, such as `2026-11-28.json`. One process at a time uses a directory.

    {"format": 1, "covered_s": 3600.0, "tenants": {"acme": {"requests": 2, "device_token_s": 57600.0}}}

    Fields that are 0 are left out. Files can be copied at any time, since they are only replaced as a whole. They are
    kept for 400 days.

    Args:
        directory: the directory.
        lock: descriptor of the locked file in the directory; `close` closes it.
    """

    def __init__(self, directory: Path, lock: int) -> None:
        self._directory = directory
        self._lock = lock

    @classmethod
    def open(cls, directory: str | Path) -> DayFiles:
        """Open a directory, which is created if it does not exist.

        Raises:
            ConfigError: the directory cannot be used, or another process uses it.
        """
        lock = _lock_directory(Path(directory))
        if lock is None:
            raise ConfigError(
                f"server.statement_path: another process uses {directory}; give each server a directory of its own"
            )
        return cls(Path(directory), lock)

    @classmethod
    def open_for_replica(cls, directory: str | Path) -> DayFiles:
        """Open the first subdirectory, `replica-0`, `replica-1`, ..., that no other replica of a fleet uses.

        Raises:
            ConfigError: the directory cannot be used, or 1,000 replicas use it.
        """
        for number in range(_MAX_REPLICAS):
            path = Path(directory) / f"replica-{number}"
            if (lock := _lock_directory(path)) is not None:
                return cls(path, lock)
        raise ConfigError(f"server.statement_path: {_MAX_REPLICAS} replicas use {directory}")

    def close(self) -> None:
        """Release the lock of the directory."""
        os.close(self._lock)

    def read(self, day: int) -> DayUse | None:
        """Return what was recorded for a day; None if nothing was. A damaged file is renamed, and counts as none.

        Raises:
            StoreUnavailable: the file cannot be read, or is damaged and cannot be renamed.
        """
        path = self._path(day)
        try:
            return _parse_day(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"statements: {path} cannot be read: {error.strerror}") from error
        except (ValueError, OverflowError, RecursionError) as error:
            new_path = _free_path(path)
            try:
                path.rename(new_path)
            except OSError as failure:
                raise StoreUnavailable(
                    f"statements: {path} is damaged and cannot be renamed: {failure.strerror}"
                ) from failure
            _log.error(
                "statements: %s is damaged (%s); it is now %s, and its day is missing", path, error, new_path.name
            )
            return None

    def write(self, day: int, use: DayUse) -> None:
        """Replace the file of a day atomically, also with respect to a power failure.

        Raises:
            OSError: the file cannot be written, and the former one is unchanged; or only the directory could not be
                synchronized.
        """
        tenants = {
            tenant: {name: number for name, number in each._asdict().items() if number}
            for tenant, each in use.tenants.items()
        }
        document = {"format": _FORMAT, "covered_s": use.covered_s, "tenants": tenants}
        replace_file(self._path(day), json.dumps(document).encode("ascii"))

    def prune(self, today: int) -> None:
        """Delete the files of days that are too old.

        Raises:
            OSError: a file cannot be deleted.
        """
        for path in self._directory.glob("*.json"):
            try:
                day = day_number(path.stem)
            except ValueError:
                continue
            if day <= today - MAX_DAYS:
                path.unlink(missing_ok=True)

    def _path(self, day: int) -> Path:
        return self._directory / f"{day_name(day)}.json"


def _lock_directory(directory: Path) -> int | None:
    """Create a directory and lock it. Returns the descriptor that holds the lock; None if another process holds it."""
    with contextlib.ExitStack() as on_error:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            on_error.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConfigError(
                f"server.statement_path: expected a directory that can be written and locked, got {directory}: "
                f"{error.strerror}"
            ) from error
        on_error.pop_all()
    return lock


def _parse_day(data: bytes) -> DayUse:
    """Parse a file.

    Raises:
        ValueError, OverflowError, RecursionError: the file is damaged. The message names no tenant.
    """
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}")
    tenants = document.get("tenants")
    if not isinstance(tenants, dict):
        raise ValueError("expected tenants")
    covered_s = float(_require_number(document.get("covered_s")))
    return DayUse(covered_s, {tenant: _parse_use(numbers) for tenant, numbers in tenants.items()})


def _parse_use(numbers: Any) -> Use:
    if not isinstance(numbers, dict):
        raise ValueError("expected the numbers of a tenant")
    return Use(**{name: _require_number(numbers[name]) for name in Use._fields if name in numbers})


def _require_number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError("expected a finite number of at least 0")
    return value


def _free_path(path: Path) -> Path:
    """Return an unused path for a damaged file, in the same directory."""
    paths = (path.with_name(f"{path.name}.damaged{f'-{number}' if number else ''}") for number in range(2**31))
    return next(each for each in paths if not each.exists())
