from __future__ import annotations

import gc

import pytest

from radixkv.errors import ConfigError
from radixkv.offload.tiers.block_store import PutOutcome, PutResult
from radixkv.offload.tiers.host import HostStore, map_memory
from radixkv.offload.tiers.open_store import StoreOptions, open_backend

from .backends import SLOT_BYTES, host_memory
from .blocks import FORMAT, OBJECT_BYTES, block, key_of, object_of


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def test_the_memory_bounds_the_store_and_the_least_recently_used_block_is_evicted() -> None:
    with host_memory(3) as memory:
        memory.put([block(number) for number in (1, 2, 3)])
        memory.get(keys(1))
        assert memory.put([block(4)]).evicted == (key_of(2),)
        assert memory.put([block(5)], victims=keys(4)).evicted == (key_of(4),)
        assert memory.exists(keys(1, 2, 3, 4, 5)) == [True, False, True, False, True]
        assert memory.size().used_bytes == memory.size().capacity_bytes == 3 * SLOT_BYTES


def test_lent_objects_are_never_evicted() -> None:
    with host_memory(2) as memory:
        memory.put([block(1), block(2)])
        loans = memory.get(keys(1, 2))
        assert memory.put([block(3)], victims=keys(1)).outcomes == (PutOutcome.NO_ROOM,)
        assert [loan and bytes(loan.data) for loan in loans] == [object_of(1), object_of(2)]
        loans[1].release()
        assert memory.put([block(3)]).evicted == (key_of(2),)


def test_a_loan_without_references_is_released() -> None:
    with host_memory(1) as memory:
        memory.put([block(1)])
        loans = memory.get(keys(1))
        del loans
        gc.collect()
        assert memory.put([block(2)]).outcomes == (PutOutcome.STORED,)


def test_a_loan_outlives_the_store() -> None:
    with host_memory(1) as memory:
        memory.put([block(1)])
        (loan,) = memory.get(keys(1))
        memory.close()
    assert loan is not None
    assert loan.data == object_of(1)
    loan.release()


def test_an_object_that_fits_no_slot_is_refused() -> None:
    with host_memory(2) as memory:
        large = block(1)._replace(payload=memoryview(bytes(SLOT_BYTES)))
        assert memory.put([large, block(2)]).outcomes == (PutOutcome.TOO_LARGE, PutOutcome.STORED)


def test_an_object_that_fails_to_serialize_leaves_its_slot_free() -> None:
    with host_memory(1) as memory:
        broken = block(1)._replace(key=None)
        with pytest.raises(Exception, match="argument for 's' must be a bytes object"):
            memory.put([broken])
        assert memory.put([block(2)]) == PutResult((PutOutcome.STORED,))


def test_memory_that_is_too_small_for_an_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"host_bytes: expected at least {SLOT_BYTES} bytes, got {OBJECT_BYTES - 1}"):
        HostStore(map_memory(OBJECT_BYTES - 1), OBJECT_BYTES)


def test_memory_that_can_not_be_allocated_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_bytes: expected memory"):
        open_backend("host", StoreOptions(FORMAT, OBJECT_BYTES, max_bytes=1 << 60))
