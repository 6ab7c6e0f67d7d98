import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.write_kv import write_kv

from ..cases import GQA, LAYER, clone, make_step, poisoned_pool


@pytest.mark.parametrize("query_lens", [[1], [15], [16], [17], [37], [17, 1, 37]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_reference_and_touches_nothing_else(
    dtype: torch.dtype, query_lens: list[int], kernel_device: str
) -> None:
    step = make_step([5] * len(query_lens), query_lens, GQA, dtype=dtype, device=kernel_device)
    key, value = torch.randn(2, sum(query_lens), 2, 32, device=kernel_device).to(dtype).unbind(0)
    expected = clone(step.pool)
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert torch.equal(step.pool.blocks, expected.blocks)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
def test_padding_of_the_head_dim_is_not_written(head_dim: int, block_size: int, kernel_device: str) -> None:
    step = make_step([3, 0], [20, 5], GQA, block_size=block_size, head_dim=head_dim, device=kernel_device)
    key, value = torch.randn(2, 25, 2, head_dim, device=kernel_device).unbind(0)
    for layer in range(2):
        expected = clone(step.pool)
        reference.write_kv(key, value, step.batch.slots, expected, layer)
        write_kv(key, value, step.batch.slots, step.pool, layer)
        assert torch.equal(step.pool.blocks, expected.blocks)


def test_rounds_to_the_pools_dtype(kernel_device: str) -> None:
    step = make_step([0], [20], GQA, dtype=torch.bfloat16, device=kernel_device)
    key, value = torch.randn(2, 20, 2, 32, device=kernel_device).unbind(0)
    expected = clone(step.pool)
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert torch.equal(step.pool.blocks, expected.blocks)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizes_to_the_same_bits_as_the_reference(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, kernel_device: str
) -> None:
    step = make_step([3], [20], GQA, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, device=kernel_device)
    key, value = torch.randn(2, 20, 2, head_dim, device=kernel_device).to(dtype).unbind(0)
    key[3] = 0
    value[4] *= 1e30
    value[5] *= 1e-30
    key[6] = key[6].round()  # some elements are then halfway between two quantized values
    expected = clone(step.pool)
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert torch.equal(step.pool.blocks, expected.blocks)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_non_finite_values_give_a_non_finite_scale(kv_dtype: torch.dtype, bad: float, kernel_device: str) -> None:
    pool = poisoned_pool(2, dtype=kv_dtype, device=kernel_device)
    key = torch.randn(3, 2, 32, device=kernel_device)
    key[1, 1, 5] = bad
    write_kv(key, key, torch.tensor([0, 1, 2], device=kernel_device), pool, LAYER)
    assert pool.scales is not None
    assert pool.scales[0, LAYER, 0, :, :3].isfinite().tolist() == [[True] * 3, [True, False, True]]


def test_key_and_value_may_be_views_of_different_layout(kernel_device: str) -> None:
    step = make_step([0], [20], GQA, device=kernel_device)
    key = torch.randn(2, 20, 32, device=kernel_device).transpose(0, 1)  # heads first in memory
    value = torch.randn(20, 6, 32, device=kernel_device)[:, 2:4]  # a slice of a fused projection
    expected = clone(step.pool)
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert torch.equal(step.pool.blocks, expected.blocks)


def test_padding_is_not_written(kernel_device: str) -> None:
    """Some tokens, in the middle and at the end, are padding and have no slot; their K/V may be NaN."""
    step = make_step([5], [20], GQA, kv_dtype=torch.int8, device=kernel_device)
    key, value = torch.randn(2, 20, 2, 32, device=kernel_device).unbind(0)
    is_padding = torch.zeros(20, dtype=torch.bool, device=kernel_device)
    is_padding[[3, 16, 18, 19]] = True
    key[is_padding] = torch.nan
    expected = clone(step.pool)
    is_token = ~is_padding
    reference.write_kv(key[is_token], value[is_token], step.batch.slots[is_token], expected, LAYER)
    write_kv(key, value, torch.where(is_padding, -1, step.batch.slots), step.pool, LAYER)
    assert torch.equal(step.pool.blocks, expected.blocks)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in the interpreter
@pytest.mark.parametrize("kv_dtype", [None, torch.int4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_magnitude_is_recorded(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, kernel_device: str
) -> None:
    """A value that is not finite stays recorded after later writes, and so does an earlier larger one."""
    step = make_step([5], [37], GQA, head_dim=80, dtype=dtype, kv_dtype=kv_dtype, device=kernel_device)
    largest = torch.zeros(2, 37, 2, device=kernel_device)  # of the reference and of the kernel
    largest[:, 4, 1] = 1e6
    for layer in range(2):
        key, value = torch.randn(2, 37, 2, 80, device=kernel_device).to(dtype).unbind(0)
        if layer == 0:
            key[0, 0, 79] = torch.nan
            value[1, 1, 0] = torch.nan
            key[2, 0, 3] = -torch.inf
        reference.write_kv(key, value, step.batch.slots, clone(step.pool), layer, largest[0])
        write_kv(key, value, step.batch.slots, step.pool, layer, largest[1])
    assert torch.equal(*largest.nan_to_num(nan=-1.0))
    assert largest[1].isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert largest[1, 2, 0] == torch.inf
    assert largest[1, 4, 1] == 1e6
    assert (largest[1, 5:] > 1).all()
