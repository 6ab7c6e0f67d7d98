import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.write_kv import write_kv

from .cases import GQA, LAYER, make_step


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


@pytest.mark.parametrize("query_lens", [[1], [15], [16], [17], [37], [17, 1, 37]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_reference_and_touches_nothing_else(
    dtype: torch.dtype, query_lens: list[int], kernel_device: str
) -> None:
    step = make_step([5] * len(query_lens), query_lens, GQA, dtype=dtype, device=kernel_device)
    key, value = torch.randn(2, sum(query_lens), 2, 32, device=kernel_device).to(dtype).unbind(0)
    expected = step.pool.clone()
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert_same_bits(step.pool, expected)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
def test_padding_of_the_head_dim_is_not_written(head_dim: int, block_size: int, kernel_device: str) -> None:
    step = make_step([3, 0], [20, 5], GQA, block_size=block_size, head_dim=head_dim, device=kernel_device)
    key, value = torch.randn(2, 25, 2, head_dim, device=kernel_device).unbind(0)
    for layer in range(2):
        expected = step.pool.clone()
        reference.write_kv(key, value, step.batch.slots, expected, layer)
        write_kv(key, value, step.batch.slots, step.pool, layer)
        assert_same_bits(step.pool, expected)


def test_rounds_to_the_pools_dtype(kernel_device: str) -> None:
    step = make_step([0], [20], GQA, dtype=torch.bfloat16, device=kernel_device)
    key, value = torch.randn(2, 20, 2, 32, device=kernel_device).unbind(0)
    expected = step.pool.clone()
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert_same_bits(step.pool, expected)


def test_key_and_value_may_be_views_of_different_layout(kernel_device: str) -> None:
    step = make_step([0], [20], GQA, device=kernel_device)
    key = torch.randn(2, 20, 32, device=kernel_device).transpose(0, 1)  # heads first in memory
    value = torch.randn(20, 6, 32, device=kernel_device)[:, 2:4]  # a slice of a fused projection
    expected = step.pool.clone()
    reference.write_kv(key, value, step.batch.slots, expected, LAYER)
    write_kv(key, value, step.batch.slots, step.pool, LAYER)
    assert_same_bits(step.pool, expected)
