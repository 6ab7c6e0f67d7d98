"""The priorities of blocks on a disk, for the process after this one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixkv.storage.tiers.block_key import KEY_BYTES

_log = logging.getLogger(__name__)
_LINE = np.dtype([("key", f"V{KEY_BYTES}"), ("ends_s", "<f8"), ("priority", "u1"), ("more", "V7")])
_NEVER = float("inf")


class KeptPriority(NamedTuple):
    """Priority of a block.

    Attributes:
        key: of the block.
        priority: 0 to 255; what the file says, which may be anything.
        ends_s: when it ends, in seconds since 1970; None for never.
    """

    key: bytes
    priority: int
    ends_s: float | None


class PriorityFile:
    """A file with a line of 48 bytes for each block that has a priority.

    It is there only between a process that ends in order and the next one: what a process that is killed was told
    after its start would contradict it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, priorities: Iterable[KeptPriority]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: the disk fails.
        """
        rows = [(key, _NEVER if ends_s is None else ends_s, priority, b"") for key, priority, ends_s in priorities]
        partial = self._path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(np.array(rows, _LINE).tobytes())
        partial.replace(self._path)

    def take(self) -> list[KeptPriority]:
        """Read the file, and delete it. Returns nothing if there is none, or if it is not one of ours.

        Raises:
            OSError: the disk fails.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        self._path.unlink()
        if len(data) % _LINE.itemsize:
            _log.warning("%s: expected whole lines, got %d bytes", self._path, len(data))
            return []
        lines = np.frombuffer(data, _LINE)
        columns = (lines[name].tolist() for name in ("key", "priority", "ends_s"))
        rows = zip(*columns, strict=True)
        return [KeptPriority(key, priority, None if ends_s == _NEVER else ends_s) for key, priority, ends_s in rows]
