import pytest
import torch

from radixkv.kernels.gpu.flat_rows import flat_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_leading_dimensions_become_rows(dtype: torch.dtype) -> None:
    rows = torch.randn(2, 3, 5).to(dtype)
    assert torch.equal(flat_rows(rows), rows.view(6, 5))
    assert torch.equal(flat_rows(rows[0, 0]), rows[0, :1])
    assert flat_rows(rows[:0]).shape == (0, 5)


def test_rows_in_place_are_not_copied() -> None:
    rows = torch.randn(7, 8)
    assert flat_rows(rows).data_ptr() == rows.data_ptr()
    assert flat_rows(rows[3:]).data_ptr() == rows[3:].data_ptr()


@pytest.mark.parametrize("first", [1, 3])
def test_unaligned_rows_are_copied_to_an_aligned_address(first: int) -> None:
    view = torch.randn(7, 37).to(torch.bfloat16)[first:]
    assert view.data_ptr() % 16 != 0
    flat = flat_rows(view)
    assert flat.data_ptr() % 16 == 0
    assert torch.equal(flat, view)


def test_strided_rows_are_copied() -> None:
    columns = torch.randn(8, 7).t()
    assert flat_rows(columns).is_contiguous()
    assert torch.equal(flat_rows(columns), columns)
    gaps = torch.randn(7, 16)[:, :8]
    assert torch.equal(flat_rows(gaps), gaps)


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_a_single_row_has_the_stride_of_several(stride: int) -> None:
    row = torch.randn(8).as_strided((1, 8), (stride, 1))
    assert row.is_contiguous()
    assert flat_rows(row).stride() == (8, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "rows: expected float32, bfloat16 or float16, got torch.float64"),
        (torch.zeros(()), r"rows: expected \[..., num_columns\] with at least one column, got shape \(\)"),
        (torch.zeros(2, 0), r"with at least one column, got shape \(2, 0\)"),
    ],
    ids=["dtype", "no dimension", "no columns"],
)
def test_tensors_without_rows_are_rejected(rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flat_rows(rows)
