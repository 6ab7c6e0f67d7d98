"""Canaries: known differences between Triton's interpreter and a GPU, and our corrections of them."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def round_to(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, SIZE)
    tl.store(target + offsets, tl.load(source + offsets).to(target.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a, b, product, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, SIZE)
    offsets = rows[:, None] * SIZE + rows[None, :]
    tl.store(product + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets), input_precision="ieee"))


@triton.jit  # type: ignore[untyped-decorator]
def count(bounds, total):  # type: ignore[no-untyped-def]
    number = 0
    for _ in range(tl.load(bounds), tl.load(bounds + 1)):
        number += 1
    tl.store(total, number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_float32_rounds_to_nearest_even(dtype: torch.dtype, kernel_device: str) -> None:
    source = torch.randn(4096, device=kernel_device)
    target = torch.empty(4096, dtype=dtype, device=kernel_device)
    round_to[(1,)](source, target, 4096)
    assert torch.equal(target.float(), source.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_values(dtype: torch.dtype, kernel_device: str) -> None:
    a, b = torch.randn(2, 32, 32, device=kernel_device).to(dtype).unbind(0)
    product = torch.empty(32, 32, device=kernel_device)
    multiply[(1,)](a, b, product, 32)
    torch.testing.assert_close(product, a.float() @ b.float())


def test_a_loop_may_have_bounds_that_were_loaded(kernel_device: str) -> None:
    bounds = torch.tensor([3, 10], dtype=torch.int32, device=kernel_device)
    total = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    count[(1,)](bounds, total)
    assert total.item() == 7
