from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest

from radixkv.offload.pinned_memory import StagingSlots, map_pinned_memory, staging_stride
from radixkv.offload.tiers.host import map_memory

from .fake_cuda import FakeCudaRuntime

NUM_BYTES = 5 * mmap.PAGESIZE + 1  # neither a power of two nor whole pages


def test_exactly_the_requested_bytes_are_pinned_until_they_are_unmapped() -> None:
    cudart = FakeCudaRuntime()
    memory = map_pinned_memory(NUM_BYTES, cudart)
    view = np.frombuffer(memory, np.uint8)[:1]
    view[0] = 7
    assert (list(cudart.pinned.values()), memory.nbytes) == ([NUM_BYTES], NUM_BYTES)
    del memory
    gc.collect()
    assert cudart.pinned, "a view is still in use"
    del view
    gc.collect()
    assert (cudart.pinned, cudart.unpinned) == ({}, [7])


def test_memory_that_cuda_refuses_to_pin_is_used_pageable(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudaRuntime(error=2)
    memory = map_pinned_memory(NUM_BYTES, cudart)
    memory[-1] = 7
    assert f"CUDA refused to pin {NUM_BYTES} bytes of host memory (error 2)" in caplog.text
    del memory
    gc.collect()
    assert cudart.unpinned == []


def test_memory_that_can_not_be_allocated_is_refused() -> None:
    with pytest.raises(MemoryError, match="can't be mapped"):
        map_memory(1 << 60)
    with pytest.raises(MemoryError, match="can't be mapped"):
        map_pinned_memory(1 << 60, FakeCudaRuntime())


def test_a_slot_is_free_again_when_its_last_view_is_collected() -> None:
    slots = StagingSlots(map_memory(2 * staging_stride(5000)), 5000)  # two slots of 5,000 bytes
    first = slots.take()
    second = slots.take()
    assert first is not None
    assert second is not None
    assert (first.nbytes, slots.num_free, slots.take()) == (5000, 0, None)
    assert not np.shares_memory(first, second)
    view = first[:10].data
    del first
    gc.collect()
    assert slots.num_free == 0
    view.release()
    del view
    gc.collect()
    assert slots.num_free == 1
