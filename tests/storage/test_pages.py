import mmap

import numpy as np
import pytest
import torch

from radixkv.kernels.kv_pool import KVPool
from radixkv.storage.pages import release_pages, use_small_pages


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("is_by_layer", [False, True])
def test_free_blocks_return_their_memory_and_the_others_keep_what_they_hold(is_by_layer: bool) -> None:
    shape = {"num_layers": 3, "num_kv_heads": 2, "block_size": 16, "head_dim": 64}
    pool = KVPool.allocate(512, **shape, dtype=torch.float32, is_by_layer=is_by_layer)
    use_small_pages(pool)
    pool.values.fill_(1.0)
    full_bytes = resident_bytes()
    is_free = np.zeros(512, dtype=np.bool_)
    is_free[100:400] = True
    is_free[450] = True
    is_touched = np.ones(512, dtype=np.bool_)
    assert release_pages(pool, is_free, is_touched)
    released_bytes = 300 * pool.blocks[0].nbytes  # without block 450, which may share its pages with neighbors
    assert full_bytes - resident_bytes() > 0.9 * released_bytes
    assert (pool.values[~torch.from_numpy(is_free)] == 1).all()
    assert (pool.values[100:400] == 0).all()


def test_blocks_that_were_never_written_are_not_released() -> None:
    pool = KVPool.allocate(8, num_layers=1, num_kv_heads=1, block_size=16, head_dim=64, dtype=torch.float32)
    pool.values.fill_(1.0)
    is_free, is_touched = np.ones(8, dtype=np.bool_), np.zeros(8, dtype=np.bool_)
    assert release_pages(pool, is_free, is_touched)
    assert (pool.values == 1).all()


def test_a_system_without_transparent_huge_pages_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE")
    use_small_pages(KVPool.allocate(8, num_layers=1, num_kv_heads=1, block_size=16, head_dim=64, dtype=torch.float32))
