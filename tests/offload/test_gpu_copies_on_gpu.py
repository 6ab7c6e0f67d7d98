"""Copies between a GPU and host memory, like `test_gpu_copies.py`, but with the streams of a real GPU."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.offload.block_mover import BlockMover
from radixkv.offload.gpu_copies import CopyStream, GpuCopies, StagingSlots, map_pinned_memory, staging_stride

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA streams without a GPU"),
]

NUM_BLOCKS = 32


def mover_of(pool: KVPool) -> tuple[BlockMover, StagingSlots]:
    """Return a mover of the blocks of a pool, and its staging slots, one for each block."""
    payload_bytes = pool.blocks[0].nbytes
    memory = map_pinned_memory(NUM_BLOCKS * staging_stride(payload_bytes))
    slots = StagingSlots(memory, payload_bytes)
    return BlockMover([pool], gpu=GpuCopies(CopyStream(pool.blocks.device), slots)), slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_are_saved_and_loaded_between_steps_that_overwrite_them(dtype: torch.dtype) -> None:
    pool = KVPool.allocate(NUM_BLOCKS, 8, 8, 64, 128, dtype=dtype, device="cuda")
    mover, slots = mover_of(pool)
    pool.blocks.random_(0, 256)
    before = pool.blocks.cpu().numpy()
    large = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    used_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        _ = torch.mm(large, large, out=torch.empty_like(large))  # keeps the compute stream busy
        read = mover.read(range(NUM_BLOCKS))
        pool.blocks.zero_()
        mover.write(range(NUM_BLOCKS)[::-1], read.payloads[::-1])
        pool.blocks.add_(0)  # a step that reads what was loaded
        read.copy.wait()
        assert [bytes(each) for each in read.payloads] == [each.tobytes() for each in before]
        del read
    torch.cuda.synchronize()
    assert np.array_equal(pool.blocks.cpu().numpy(), before)
    peak_bytes = torch.cuda.max_memory_allocated() - used_bytes
    assert peak_bytes <= large.nbytes + pool.blocks.nbytes // 8, "the result of the matmul, and no copy of the blocks"
    mover.read([0]).copy.wait()
    mover.read([0])
    gc.collect()
    assert slots.num_free >= NUM_BLOCKS - 2, "at most the slots of the last two copies are still in use"


def test_memory_of_any_size_is_pinned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        memory = map_pinned_memory((96 << 20) + 4096)
    assert "refused" not in caplog.text
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()


def test_a_refusal_to_pin_does_not_fail_the_next_kernel(caplog: pytest.LogCaptureFixture) -> None:
    memory = map_pinned_memory(1 << 20)
    registered_address = np.frombuffer(memory, np.uint8).ctypes.data

    class RegistersTwice:
        """Registers memory that is registered already, which CUDA refuses."""

        def cudaHostRegister(self, _: int, num_bytes: int, flags: int) -> object:  # noqa: N802
            return torch.cuda.cudart().cudaHostRegister(registered_address, num_bytes, flags)

        def cudaGetErrorString(self, error: object) -> str:  # noqa: N802
            return torch.cuda.cudart().cudaGetErrorString(error)

    map_pinned_memory(1 << 20, RegistersTwice())
    assert "CUDA refused to pin" in caplog.text
    assert torch.ones(4, device="cuda").add_(1).sum().item() == 8
