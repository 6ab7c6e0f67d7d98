"""Disk stores for tests, in a module that imports little, so that the processes of `writer.py` start quickly."""

from __future__ import annotations

from pathlib import Path

from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.tiers.disk import DiskStore

from .blocks import FORMAT, OBJECT_BYTES

PAGE_BYTES = 4096  # more than a payload, and more than what precedes it in an object
SLOT_BYTES = 2 * PAGE_BYTES  # a page in each of the two files


def disk_at(path: Path, num_objects: int, native: NativeCopies | None = None) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, num_objects * SLOT_BYTES, native=native)
