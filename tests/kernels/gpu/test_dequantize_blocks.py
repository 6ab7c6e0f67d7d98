import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.dequantize_blocks import dequantize_blocks
from radixkv.kernels.kv_pool import KVPool

from ..cases import LAYER, poisoned_pool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.int4
BLOCK_IDS = [6, 0, 3]


def filled_pool(kv_dtype: torch.dtype, device: str, **shape: int) -> KVPool:
    """Make a pool of seven blocks, with noise in one layer in all but the last slot of each, and NaN elsewhere."""
    pool = poisoned_pool(7, dtype=kv_dtype, device=device, **shape)
    slots = torch.arange(7 * pool.block_size).view(7, -1)[:, :-1].flatten().to(device)
    noise = torch.randn(2, len(slots), pool.num_kv_heads, pool.head_dim, generator=torch.Generator().manual_seed(0))
    reference.write_kv(*noise.to(device), slots, pool, LAYER)
    return pool


def dequantize_like_reference(pool: KVPool, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Dequantize `BLOCK_IDS`, assert that the result is that of the reference, and return it."""
    block_ids = torch.tensor(BLOCK_IDS, dtype=torch.int32, device=device)
    got = dequantize_blocks(pool, LAYER, block_ids, dtype)
    expected = reference.dequantize_blocks(pool, LAYER, block_ids, dtype)
    assert (got.dtype, got.scales, got.values.shape) == (dtype, None, expected.values.shape)
    torch.testing.assert_close(got.values, expected.values, rtol=0, atol=0, equal_nan=True)
    return got.values


@pytest.mark.parametrize("head_dim", [36, 80, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kv_dtype", [FP8, INT8, INT4], ids=str)
def test_is_bitwise_identical_to_the_reference(
    kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, kernel_device: str
) -> None:
    dequantize_like_reference(filled_pool(kv_dtype, kernel_device, head_dim=head_dim), dtype, kernel_device)


@pytest.mark.parametrize(("num_kv_heads", "block_size"), [(1, 16), (3, 16), (2, 64), (1, 128)])
def test_blocks_may_be_smaller_or_larger_than_a_tile(num_kv_heads: int, block_size: int, kernel_device: str) -> None:
    pool = filled_pool(INT8, kernel_device, num_kv_heads=num_kv_heads, block_size=block_size)
    dequantize_like_reference(pool, BF16, kernel_device)


@pytest.mark.parametrize("kv_dtype", [FP8, INT8, INT4], ids=str)
def test_a_non_finite_scale_affects_only_its_vector(kv_dtype: torch.dtype, kernel_device: str) -> None:
    pool = filled_pool(kv_dtype, kernel_device)
    assert pool.scales is not None
    pool.scales[BLOCK_IDS[1], LAYER, 1, 0, 5] = float("nan")
    values = dequantize_like_reference(pool, BF16, kernel_device)[:, :, :, :, :-1]  # the last slots are unwritten
    assert values[1, 0, 1, 0, 5].isnan().all()
    assert int(values.isnan().sum()) == pool.head_dim


def test_plain_pools_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a quantized pool, got one of torch\.bfloat16"):
        dequantize_blocks(poisoned_pool(2, dtype=BF16), LAYER, torch.tensor([1], dtype=torch.int32), BF16)


def test_strided_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="block_ids: expected a contiguous tensor"):
        dequantize_blocks(poisoned_pool(2, dtype=INT8), LAYER, torch.zeros(4, dtype=torch.int32)[::2], BF16)
