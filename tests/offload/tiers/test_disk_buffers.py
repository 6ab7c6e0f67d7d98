from __future__ import annotations

import numpy as np

from radixkv.offload.tiers.disk import BufferPool


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def test_buffers_are_reused_up_to_a_bound() -> None:
    pool = BufferPool(8192, max_idle_bytes=2 * 8192)
    first, second, third = taken = [pool.take() for _ in range(3)]
    for each in taken:
        pool.give_back(each)
    again = {_address(pool.take()) for _ in range(2)}
    assert again == {_address(first), _address(second)}
    assert pool.take().nbytes == third.nbytes == 8192


def test_no_two_buffers_share_bytes() -> None:
    pool = BufferPool(4096, max_idle_bytes=3 * 4096 + 100)
    taken = [pool.take() for _ in range(5)]
    for number, each in enumerate(taken):
        each[:] = bytes([number]) * 4096
    assert [bytes(each) for each in taken] == [bytes([number]) * 4096 for number in range(5)]


def test_a_pool_without_capacity_still_returns_buffers() -> None:
    pool = BufferPool(8192, max_idle_bytes=8191)
    first = pool.take()
    pool.give_back(first)
    assert pool.take().obj is not first.obj


def test_buffers_are_page_aligned() -> None:
    pool = BufferPool(12_288, max_idle_bytes=2 * 12_288)
    taken = [pool.take() for _ in range(3)]
    assert [(_address(each) % 4096, each.nbytes) for each in taken] == [(0, 12_288)] * 3
