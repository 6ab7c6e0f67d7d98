"""The index of the largest number of each row, compared with PyTorch's."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from radixkv.compute.forward import argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 49_152), (0, 5)])
def test_the_index_is_that_of_pytorch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    rows = (rows * 3).round()  # most rows have their largest number several times
    assert torch.equal(argmax(rows), rows.argmax(dim=-1))
    assert torch.equal(argmax(rows[:, ::2]), rows[:, ::2].argmax(dim=-1))
    with torch.inference_mode():
        assert torch.equal(argmax(rows + 0), rows.argmax(dim=-1))


@pytest.mark.parametrize("size", [4, 100, 49_152])
@pytest.mark.parametrize("column", [0, 1, -1])
def test_nan_is_larger_than_infinity_and_the_first_of_equal_numbers_counts(size: int, column: int) -> None:
    rows = torch.zeros(4, size)
    rows[0, column], rows[0, size // 2] = nan, inf
    rows[1, column] = inf
    rows[2] = -inf
    rows[3, [column, size // 2]] = nan
    indices = argmax(rows)
    assert torch.equal(indices, rows.argmax(dim=-1))
    assert indices[1:3].tolist() == [column % size, 0]
