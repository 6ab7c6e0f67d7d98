"""The directory of one format's blocks: who it belongs to, and that one process has it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from radixkv.errors import StoreUnavailable
from radixkv.storage.tiers.block_key import BlockFormat

_VERSION = 2
_STAT_BLOCK_BYTES = 512
_LABEL, _LOCK = "format.json", "lock"


class DiskDirectory:
    """A directory below the configured one, named by a format's fingerprint; readable by this user alone.

    Its lock is the process's, so a process that is killed leaves none behind.

    Args:
        parent: the configured directory; made if there is none.
        block_format: format of the blocks.

    Raises:
        StoreUnavailable: it can't be written, another process has it, or it is of another format.
    """

    def __init__(self, parent: Path, block_format: BlockFormat) -> None:
        self.path = parent / block_format.fingerprint
        self._label = {"version": _VERSION, "fingerprint": block_format.fingerprint, **asdict(block_format)}
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            self._claim()
        except BaseException:
            os.close(self._lock)
            raise

    def _not_writable(self, error: OSError) -> StoreUnavailable:
        reason = f"{self.path}: {error.strerror}"
        return StoreUnavailable(f"tiers.disk_path: expected a directory to write to, got {reason}")

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: expected to be alone, got another process that uses it") from error
        label = self.path / _LABEL
        try:
            if not label.exists():
                self._write(label)
            if json.loads(label.read_bytes()) != self._label:
                raise StoreUnavailable(f"{label}: expected this model's format, got another")
        except ValueError as error:
            raise StoreUnavailable(f"{label}: expected this model's format, got something unreadable") from error
        except OSError as error:
            raise self._not_writable(error) from error

    def _write(self, label: Path) -> None:
        """Write the label: the old one or the whole new one is there, also after a power failure."""
        partial = label.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(self._label, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(label)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def half_of_free(path: Path) -> int:
    """Return half of the bytes that are free for blocks at a path, those that blocks of earlier starts take too.

    The path need not exist yet.
    """
    ours = sum(file.stat().st_blocks * _STAT_BLOCK_BYTES for file in path.glob("*/*")) if path.is_dir() else 0
    parent = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    return (shutil.disk_usage(parent).free + ours) // 2
