from pathlib import Path

import pytest
import torch

from radixkv.kernels.kv_pool import KVPool

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_consists_of_values_and_scales(dtype: torch.dtype) -> None:
    pool = KVPool.allocate(5, 3, 2, 16, 8, dtype=dtype)
    assert (pool.num_layers, pool.num_kv_heads, pool.block_size, pool.head_dim) == (3, 2, 16, 8)
    assert pool.values.shape == ((5, 3, 1, 2, 16, 8 + 4) if dtype == torch.int4 else (5, 3, 2, 2, 16, 8))
    assert pool.keys.shape == (5, 3, 2, 16, 8)
    assert pool.blocks.is_contiguous()
    assert not pool.blocks.any()
    pool.values[3].view(torch.uint8).fill_(1)
    if pool.scales is not None:
        assert pool.scales.shape == (5, 3, 2, 2, 16)
        pool.scales[3].view(torch.uint8).fill_(1)
    assert pool.blocks[3].all()
    assert int(pool.blocks.sum()) == pool.blocks.shape[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_by_layer_has_the_same_contents_in_another_order(dtype: torch.dtype) -> None:
    by_layer = KVPool.allocate(5, 3, 2, 16, 8, dtype=dtype, is_by_layer=True)
    by_block = KVPool.allocate(5, 3, 2, 16, 8, dtype=dtype)
    assert by_layer.values.shape == by_block.values.shape
    assert by_layer.is_by_layer == (by_layer.scales is None), "a quantized pool is ordered by block"
    assert not by_layer.blocks.any()
    by_layer.values[3].view(torch.uint8).fill_(1)
    if by_layer.scales is not None:
        by_layer.scales[3].view(torch.uint8).fill_(1)
    assert by_layer.blocks[3].all()
    assert int(by_layer.blocks.sum()) == by_layer.blocks[3].numel() == by_block.blocks[3].numel()


@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_a_latent_pool_has_one_vector_per_token_and_layer(dtype: torch.dtype, is_by_layer: bool) -> None:
    pool = KVPool.allocate(5, 3, 1, 16, 40, dtype=dtype, is_by_layer=is_by_layer, is_latent=True)
    plain = KVPool.allocate(5, 3, 1, 16, 40, dtype=dtype, is_by_layer=is_by_layer)
    assert pool.is_latent
    assert not plain.is_latent
    assert pool.values.shape == (5, 3, 1, 1, 16, 40)
    assert 2 * pool.blocks.numel() == plain.blocks.numel()
    pool.values[3].view(torch.uint8).fill_(1)
    if pool.scales is not None:
        pool.scales[3].view(torch.uint8).fill_(1)
    assert pool.blocks[3].all()
    assert int(pool.blocks.sum()) == pool.blocks[3].numel()


def test_latents_of_4_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="expected another one for latents"):
        KVPool.allocate(5, 3, 1, 16, 40, dtype=torch.int4, is_latent=True)


def test_adjacent_blocks_of_a_pool_by_layer_are_adjacent_in_each_head() -> None:
    pool = KVPool.allocate(5, 3, 2, 16, 8, dtype=torch.float32, is_by_layer=True)
    keys = pool.values[1:4, 2, 0].permute(1, 0, 2, 3)  # [num_kv_heads, num_blocks, block_size, head_dim]
    assert keys.flatten(1, 2).data_ptr() == keys.data_ptr(), "a view, not a copy"


@pytest.mark.parametrize("is_by_layer", [False, True])
def test_a_zeroed_pool_takes_memory_only_when_it_is_written(is_by_layer: bool) -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    pool = KVPool.allocate(4096, 1, 1, 64, 256, dtype=torch.float32, is_by_layer=is_by_layer)
    assert resident_pages() - before < 10_000
    pool.blocks[:1024].fill_(1)
    assert resident_pages() - before > 30_000
    assert not pool.blocks[-1].any()


def test_out_of_memory_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match="can't be mapped"):
        KVPool.allocate(2**50, 1, 1, 64, 256, dtype=torch.float32)


def test_a_pool_of_no_blocks_is_empty() -> None:
    assert KVPool.allocate(0, 2, 1, 16, 8, dtype=torch.float32).values.shape == (0, 2, 2, 1, 16, 8)
