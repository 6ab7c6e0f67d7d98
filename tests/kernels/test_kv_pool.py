import pytest
import torch

from radixkv.kernels.kv_pool import KVPool

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_scales_are_all_of_a_block(dtype: torch.dtype) -> None:
    pool = KVPool.allocate(5, 3, 2, 16, 8, dtype=dtype)
    assert (pool.num_layers, pool.num_kv_heads, pool.block_size, pool.head_dim) == (3, 2, 16, 8)
    assert pool.values.shape == (5, 3, 2, 2, 16, 4 if dtype == torch.int4 else 8)
    assert pool.blocks.is_contiguous()
    assert not pool.blocks.any()
    pool.values[3].view(torch.uint8).fill_(1)
    if pool.scales is not None:
        assert pool.scales.shape == (5, 3, 2, 2, 16)
        pool.scales[3].view(torch.uint8).fill_(1)
    assert pool.blocks[3].all()
    assert int(pool.blocks.sum()) == pool.blocks.shape[1]
