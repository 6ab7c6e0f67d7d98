"""Copies between a GPU's pool and host memory, in streams that run everything as late as possible."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.offload.block_mover import BlockMover, payload_sizes
from radixkv.offload.copies import Copy
from radixkv.offload.gpu_copies import CopyStream, GpuCopies, StagingSlots, map_pinned_memory, staging_stride
from radixkv.offload.tiers.host import map_memory

from .fake_cuda import COPY_MS, FakeCuda, FakeCudaRuntime

NUM_SLOTS = 4
NUM_PINNED_BYTES = 5 * mmap.PAGESIZE + 1  # neither a power of two nor whole pages


class Gpu(NamedTuple):
    """A mover that copies between the pools of a fake GPU and staging slots.

    Attributes:
        cuda: runs the steps and the copies.
        pool: blocks of two layers.
        parts: parts of these blocks, of one windowed layer.
        slots: the staging slots in host memory.
        mover: copies blocks and parts.
    """

    cuda: FakeCuda
    pool: KVPool
    parts: KVPool
    slots: StagingSlots
    mover: BlockMover


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    pool, parts = (
        KVPool.allocate(6, num_layers, num_kv_heads=3, block_size=4, head_dim=6, dtype=torch.int8)
        for num_layers in (2, 1)
    )
    _, payload_bytes = payload_sizes([pool], [parts])
    slots = StagingSlots(map_memory(NUM_SLOTS * staging_stride(payload_bytes)), payload_bytes)
    cuda = FakeCuda()
    stream = CopyStream(torch.device("cpu"), cuda)
    with cuda:
        yield Gpu(cuda, pool, parts, slots, BlockMover([pool], [parts], gpu=GpuCopies(stream, slots)))


def test_blocks_are_read_between_the_previous_and_the_next_step(gpu: Gpu) -> None:
    gpu.cuda.launch(lambda: gpu.pool.blocks.fill_(1))
    gpu.cuda.launch(lambda: gpu.parts.blocks.fill_(2))
    read = gpu.mover.read([3, 1], [None, 5])
    gpu.cuda.launch(lambda: gpu.pool.blocks.fill_(3))
    assert not read.copy.is_complete()
    gpu.cuda.compute.synchronize()
    assert read.copy.is_complete(), "the next step waits for the copy"
    without_part, with_part = (np.frombuffer(each, np.uint8) for each in read.payloads)
    assert (without_part.nbytes, with_part.nbytes) == (gpu.mover.block_bytes, gpu.mover.payload_bytes)
    assert set(without_part) == set(with_part[: gpu.mover.block_bytes]) == {1}
    assert set(with_part[gpu.mover.block_bytes :]) == {2}
    assert read.copy.seconds() == COPY_MS / 1000
    assert gpu.cuda.num_blocking_copies == 0


def test_waiting_for_a_copy_does_not_wait_for_later_ones(gpu: Gpu) -> None:
    gpu.cuda.launch(lambda: gpu.pool.blocks.fill_(1))
    read = gpu.mover.read([3])
    gpu.cuda.launch(lambda: gpu.pool.blocks.fill_(2))
    read.copy.wait()
    assert set(bytes(read.payloads[0])) == {1}
    assert set(gpu.pool.blocks.flatten().tolist()) == {1}


def test_blocks_are_written_between_the_previous_and_the_next_step(gpu: Gpu) -> None:
    with_part_bytes, without_part_bytes = gpu.mover.sizes
    payloads = [
        memoryview(np.full(with_part_bytes, 1, np.uint8)).toreadonly(),
        memoryview(np.full(without_part_bytes, 2, np.uint8)).toreadonly(),
    ]
    seen: list[object] = []  # the first bytes of all blocks, and of two parts, in the next step
    gpu.cuda.launch(lambda: gpu.pool.blocks.fill_(9))
    copy = gpu.mover.write([2, 4], payloads)
    parts = gpu.mover.write_parts([0], payloads[:1])
    gpu.cuda.launch(lambda: seen.extend([gpu.pool.blocks[:, 0].tolist(), gpu.parts.blocks[:2, 0].tolist()]))
    assert not gpu.pool.blocks.any()
    gpu.cuda.compute.synchronize()
    assert seen == [[9, 9, 1, 9, 2, 9], [1, 0]]
    assert copy.is_complete()
    assert parts.is_complete()
    assert gpu.cuda.num_blocking_copies == 0


def test_a_block_is_saved_before_another_one_is_loaded_in_its_place(gpu: Gpu) -> None:
    gpu.pool.blocks.fill_(1)
    read = gpu.mover.read([3])
    copy = gpu.mover.write([3], [memoryview(bytes([2]) * gpu.mover.payload_bytes)])
    copy.wait()
    assert set(bytes(read.payloads[0])) == {1}
    assert set(gpu.pool.blocks[3].tolist()) == {2}


def test_a_slot_is_not_reused_before_its_copy_is_complete(gpu: Gpu) -> None:
    def start_read() -> Copy:
        return gpu.mover.read([0, 1]).copy

    def start_write() -> Copy:
        return gpu.mover.write([0], [stage_payload(gpu)])

    for start_copy in (start_read, start_write):
        copy = start_copy()  # only the copy keeps the payloads
        gc.collect()
        assert gpu.slots.num_free < NUM_SLOTS
        copy.wait()
        with pytest.raises(MemoryError):  # the read releases the slots of complete copies before it fails
            gpu.mover.read(range(NUM_SLOTS + 1))
        gc.collect()
        assert gpu.slots.num_free == NUM_SLOTS


def test_without_free_slots_nothing_is_read_or_staged(gpu: Gpu) -> None:
    read = gpu.mover.read([0, 1, 2, 3])
    with pytest.raises(MemoryError, match="no staging slots for 1 blocks"):
        gpu.mover.read([4])
    assert gpu.mover.stage(memoryview(bytes(100))) is None
    assert len(read.payloads) == NUM_SLOTS


def test_a_staged_payload_has_the_same_bytes_in_a_slot(gpu: Gpu) -> None:
    payload = memoryview(np.random.default_rng(0).bytes(gpu.mover.block_bytes))
    staged = gpu.mover.stage(payload)
    assert staged is not None
    assert (staged, gpu.slots.num_free) == (payload, NUM_SLOTS - 1)
    assert BlockMover([gpu.pool]).stage(payload) is None, "on a CPU no payload needs to be staged"


def stage_payload(gpu: Gpu) -> memoryview:
    """Return a payload of zeros in a slot."""
    payload = gpu.mover.stage(memoryview(bytes(gpu.mover.payload_bytes)))
    assert payload is not None
    return payload


def test_exactly_the_requested_bytes_are_pinned_until_they_are_unmapped() -> None:
    cudart = FakeCudaRuntime()
    memory = map_pinned_memory(NUM_PINNED_BYTES, cudart)
    view = np.frombuffer(memory, np.uint8)[:1]
    view[0] = 7
    assert (list(cudart.pinned.values()), memory.nbytes) == ([NUM_PINNED_BYTES], NUM_PINNED_BYTES)
    del memory
    gc.collect()
    assert cudart.pinned, "a view is still in use"
    del view
    gc.collect()
    assert (cudart.pinned, cudart.unpinned) == ({}, [7])


def test_memory_that_cuda_refuses_to_pin_is_used_pageable(caplog: pytest.LogCaptureFixture) -> None:
    cudart = FakeCudaRuntime(error=2)
    memory = map_pinned_memory(NUM_PINNED_BYTES, cudart)
    memory[-1] = 7
    assert f"CUDA refused to pin {NUM_PINNED_BYTES} bytes of host memory (error 2)" in caplog.text
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
