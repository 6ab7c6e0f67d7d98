"""Disk stores for tests, without the rest of the backends: a writer that is killed a thousand times starts fast."""

from __future__ import annotations

from pathlib import Path

from radixkv.storage.tiers.disk import DiskStore

from .blocks import FORMAT, OBJECT_BYTES

PAGE_BYTES = 4096  # a slot: an object takes less


def disk_at(path: Path, num_objects: int) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, num_objects * PAGE_BYTES)
