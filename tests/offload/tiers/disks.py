"""Disk stores for tests, in a separate module, so that writers that are killed start quickly."""

from __future__ import annotations

from pathlib import Path

from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.tiers.disk import DiskStore

from .blocks import FORMAT, OBJECT_BYTES

PAGE_BYTES = 4096  # more than a payload, or its header
SLOT_BYTES = 2 * PAGE_BYTES


def disk_at(path: Path, num_objects: int, native: NativeCopies | None = None) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, num_objects * SLOT_BYTES, native=native)
