"""The backends with which the tests of all stores run. The memory and the disks have room for a number of objects."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv.kernels.native.copies import NativeCopies
from radixkv.model.on_cpu import native_copies
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.host import HostStore, map_memory
from radixkv.offload.tiers.redis import RedisStore
from tests.patience import PATIENCE_S

from . import mooncake_master
from .blocks import OBJECT_BYTES
from .disks import disk_at
from .redis_server import SERVER, WHY_NOT, redis_server

SLOT_BYTES = -(-OBJECT_BYTES // 64) * 64  # rounded up to whole cache lines


def native_or_skip() -> NativeCopies:
    """Return the copies in C++; skip the test if there are none."""
    if (native := native_copies()) is None:
        pytest.skip("there are no kernels in C++ for this machine")
    return native


@contextlib.contextmanager
def host_memory(num_objects: int) -> Iterator[HostStore]:
    yield HostStore(map_memory(num_objects * SLOT_BYTES), OBJECT_BYTES)


@contextlib.contextmanager
def native_host_memory(num_objects: int) -> Iterator[HostStore]:
    yield HostStore(map_memory(num_objects * SLOT_BYTES), OBJECT_BYTES, native_or_skip())


@contextlib.contextmanager
def disk(num_objects: int) -> Iterator[DiskStore]:
    with tempfile.TemporaryDirectory() as path:
        yield disk_at(Path(path), num_objects)


@contextlib.contextmanager
def native_disk(num_objects: int) -> Iterator[DiskStore]:
    with tempfile.TemporaryDirectory() as path:
        yield disk_at(Path(path), num_objects, native=native_or_skip())


@contextlib.contextmanager
def shared_redis(_: int) -> Iterator[RedisStore]:
    if SERVER is None:
        pytest.skip(WHY_NOT)
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        yield RedisStore(server.url, OBJECT_BYTES, timeout_s=PATIENCE_S)


@contextlib.contextmanager
def shared_mooncake(_: int) -> Iterator[StoreBackend]:
    if mooncake_master.WHY_NOT is not None:
        pytest.skip(mooncake_master.WHY_NOT)
    from radixkv.offload.tiers.mooncake import MooncakeStore

    with mooncake_master.mooncake_master(mooncake_master.free_port()) as address:
        yield MooncakeStore(address, OBJECT_BYTES, lent_bytes=16 << 20, buffer_bytes=16 << 20)


BACKENDS: dict[str, Callable[[int], contextlib.AbstractContextManager[StoreBackend]]] = {
    "host_memory": host_memory,
    "host_memory_native": native_host_memory,
    "disk": disk,
    "disk_native": native_disk,
    "redis": shared_redis,
    "mooncake": shared_mooncake,
}
SHARED = ("redis", "mooncake")
