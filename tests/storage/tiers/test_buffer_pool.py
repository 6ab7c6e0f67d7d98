from __future__ import annotations

import numpy as np

from radixkv.storage.tiers.buffer_pool import BufferPool


def test_buffers_are_used_again_up_to_a_bound() -> None:
    pool = BufferPool(8192, max_idle_bytes=2 * 8192)
    first, second, third = (pool.take() for _ in range(3))
    assert len({id(each.obj) for each in (first, second, third)}) == 3
    for each in (first, second, third):
        pool.give_back(each)
    again = {id(pool.take().obj) for _ in range(2)}
    assert again == {id(first.obj), id(second.obj)}
    assert pool.take().nbytes == 8192


def test_buffers_begin_with_a_page() -> None:
    buffer = np.frombuffer(BufferPool(12_288).take(), np.uint8)
    assert buffer.ctypes.data % 4096 == 0
    assert buffer.nbytes == 12_288
