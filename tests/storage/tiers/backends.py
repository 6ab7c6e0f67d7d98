"""Backends that the tests of all stores run over. Each is made with room for a number of objects."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from radixkv.storage.tiers.block_store import StoreBackend
from radixkv.storage.tiers.disk import DiskStore
from radixkv.storage.tiers.host_memory import HostMemory, allocate_arena

from .blocks import OBJECT_BYTES
from .disks import disk_at

SLOT_BYTES = -(-OBJECT_BYTES // 64) * 64


@contextlib.contextmanager
def host_memory(num_objects: int) -> Iterator[HostMemory]:
    yield HostMemory(allocate_arena(num_objects * SLOT_BYTES), OBJECT_BYTES)


@contextlib.contextmanager
def disk(num_objects: int) -> Iterator[DiskStore]:
    with tempfile.TemporaryDirectory() as path:
        yield disk_at(Path(path), num_objects)


BACKENDS: dict[str, Callable[[int], contextlib.AbstractContextManager[StoreBackend]]] = {
    "host_memory": host_memory,
    "disk": disk,
}
