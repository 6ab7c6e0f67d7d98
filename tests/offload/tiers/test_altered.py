"""No block that was altered in a store is used, whatever an attacker without the secret does to it."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv.offload.tiers.block_object import ObjectFault, open_object
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.redis import RedisStore
from tests.patience import PATIENCE_S

from . import mooncake_master
from .altered import ALTERATIONS, NUM_BLOCKS, STORED_BYTES, make_world, outcomes_of
from .backends import native_or_skip
from .blocks import FORMAT, PAYLOAD_BYTES, payload_of
from .disks import SLOT_BYTES
from .redis_server import SERVER, WHY_NOT, redis_server


@contextlib.contextmanager
def disk() -> Iterator[StoreBackend]:
    with tempfile.TemporaryDirectory() as path:
        yield DiskStore(Path(path), FORMAT, STORED_BYTES, 4 * NUM_BLOCKS * SLOT_BYTES)


@contextlib.contextmanager
def native_disk() -> Iterator[StoreBackend]:
    with tempfile.TemporaryDirectory() as path:
        yield DiskStore(Path(path), FORMAT, STORED_BYTES, 4 * NUM_BLOCKS * SLOT_BYTES, native=native_or_skip())


@contextlib.contextmanager
def redis() -> Iterator[StoreBackend]:
    if SERVER is None:
        pytest.skip(WHY_NOT)
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        yield RedisStore(server.url, STORED_BYTES, timeout_s=PATIENCE_S)


@contextlib.contextmanager
def mooncake() -> Iterator[StoreBackend]:
    if mooncake_master.WHY_NOT is not None:
        pytest.skip(mooncake_master.WHY_NOT)
    from radixkv.offload.tiers.mooncake import MooncakeStore

    with mooncake_master.mooncake_master(mooncake_master.free_port()) as address:
        yield MooncakeStore(address, STORED_BYTES, lent_bytes=16 << 20, buffer_bytes=16 << 20)


STORES = {"disk": disk, "disk_native": native_disk, "redis": redis, "mooncake": mooncake}


@pytest.mark.parametrize("is_sealed", [False, True], ids=["authenticated", "sealed"])
def test_sound_blocks_are_used(*, is_sealed: bool) -> None:
    """Otherwise the other tests of this file would prove nothing."""
    world = make_world(is_sealed=is_sealed)
    for index, (wanted, data) in enumerate(zip(world.wanted, world.sound, strict=True)):
        assert open_object(memoryview(data), wanted, PAYLOAD_BYTES) == payload_of(index)


def test_most_alterations_are_used_without_a_secret() -> None:
    """Without a secret, only other keys, tokens and lengths are detected."""
    world = make_world(is_sealed=False)
    wanted = world.wanted[1]._replace(protection=None)
    used = set()
    for alteration in ALTERATIONS:
        for seed in range(20):
            data = memoryview(alteration(world, 1, random.Random(seed)))
            if not isinstance(open_object(data, wanted, PAYLOAD_BYTES), ObjectFault):
                used.add(alteration.__name__)
    assert used >= {"flipped", "zeroed", "impersonated", "grafted", "spliced", "forged"}


@pytest.mark.parametrize(("num_cases", "seed"), [(96, 1), pytest.param(10_000, 2, marks=pytest.mark.long)])
@pytest.mark.parametrize("store", STORES)
def test_no_altered_block_is_used(store: str, num_cases: int, seed: int) -> None:
    open_store: Callable[[], contextlib.AbstractContextManager[StoreBackend]] = STORES[store]
    with open_store() as backend:
        counts = outcomes_of(backend, num_cases, seed)
    assert not counts["used"]
    assert not counts["lost"]
    assert not counts["absent"], "each altered block was in the store"
    assert counts["right"]
    assert counts["unauthentic"] > num_cases // 4
    assert sum(counts.values()) == num_cases
