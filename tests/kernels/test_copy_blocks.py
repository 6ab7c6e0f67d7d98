import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.copy_blocks import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "block_shape",
    [(2, 2, 2, 16, 80), (1, 2, 1, 16, 16), (3, 2, 4, 32, 32)],
    ids=["chunks and a rest", "less than a chunk", "whole chunks"],
)
def test_matches_reference_and_touches_nothing_else(
    block_shape: tuple[int, ...], dtype: torch.dtype, kernel_device: str
) -> None:
    pool = torch.randn(9, *block_shape, device=kernel_device).to(dtype)
    sources = torch.tensor([8, 1, 8], device=kernel_device)
    targets = torch.tensor([0, 7, 4], device=kernel_device)
    expected = pool.clone()
    reference.copy_blocks(expected, sources, targets)
    copy_blocks(pool, sources, targets)
    assert torch.equal(pool, expected)


def test_nan_payloads_survive(kernel_device: str) -> None:
    pool = torch.zeros(3, 1, 2, 1, 16, 16, dtype=torch.bfloat16, device=kernel_device)
    bits = pool.view(torch.int16)
    bits[1] = 0x7FC1
    copy_blocks(pool, torch.tensor([1], device=kernel_device), torch.tensor([2], device=kernel_device))
    assert torch.equal(bits[2], bits[1])
    assert not bits[0].any()


def test_nothing_to_copy_is_no_launch(kernel_device: str) -> None:
    pool = torch.randn(3, 1, 2, 1, 16, 16, device=kernel_device)
    before = pool.clone()
    empty = torch.empty(0, dtype=torch.int64, device=kernel_device)
    copy_blocks(pool, empty, empty)
    assert torch.equal(pool, before)


def test_strided_ids_are_refused(kernel_device: str) -> None:
    pool = torch.zeros(4, 1, 2, 1, 16, 16, device=kernel_device)
    pairs = torch.tensor([[0, 2], [1, 3]], device=kernel_device)
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        copy_blocks(pool, pairs[:, 0], pairs[:, 1])
