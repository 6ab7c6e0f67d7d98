import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.copy_blocks import copy_blocks
from radixkv.kernels.kv_pool import KVPool

from ..cases import clone, poisoned_pool


def random_pool(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> KVPool:
    pool = poisoned_pool(num_blocks, num_kv_heads, 16, head_dim, dtype, device)
    pool.blocks.random_()
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int4], ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim"), [(2, 80), (1, 16), (4, 256)], ids=["spans and a rest", "less than a span", "long"]
)
def test_matches_reference_and_touches_nothing_else(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, kernel_device: str
) -> None:
    pool = random_pool(9, num_kv_heads, head_dim, dtype, kernel_device)
    sources = torch.tensor([8, 1, 8], device=kernel_device)
    targets = torch.tensor([0, 7, 4], device=kernel_device)
    expected = clone(pool)
    reference.copy_blocks(expected, sources, targets)
    copy_blocks(pool, sources, targets)
    assert torch.equal(pool.blocks, expected.blocks)


def test_an_empty_copy_launches_no_kernel(kernel_device: str) -> None:
    pool = random_pool(3, 1, 16, torch.float32, kernel_device)
    before = pool.blocks.clone()
    empty = torch.empty(0, dtype=torch.int64, device=kernel_device)
    copy_blocks(pool, empty, empty)
    assert torch.equal(pool.blocks, before)


def test_strided_ids_are_refused(kernel_device: str) -> None:
    pool = poisoned_pool(4, device=kernel_device)
    pairs = torch.tensor([[0, 2], [1, 3]], device=kernel_device)
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        copy_blocks(pool, pairs[:, 0], pairs[:, 1])
