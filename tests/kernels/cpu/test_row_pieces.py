import pytest
import torch

from radixkv.kernels.cpu.row_pieces import ELEMENTS_PER_CALL, in_row_pieces


@pytest.mark.parametrize("function", [torch.cos, torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.gelu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 63, 64, 300, 40_000])
def test_elementwise_results_do_not_depend_on_the_position(
    num_columns: int, dtype: torch.dtype, function: object
) -> None:
    assert callable(function)
    rows = torch.randn(37, num_columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = in_row_pieces(function, rows)
    assert torch.allclose(whole.float(), function(rows).float(), atol=1e-2 if dtype is torch.bfloat16 else 1e-6)
    for start, end in ((0, 1), (1, 3), (3, 36), (36, 37)):
        assert torch.equal(in_row_pieces(function, rows[start:end]), whole[start:end])
    order = torch.randperm(37)
    assert torch.equal(in_row_pieces(function, rows[order]), whole[order])


def test_torch_alone_depends_on_the_position() -> None:
    rows = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)) * 3
    whole = torch.nn.functional.gelu(rows, approximate="tanh")
    alone = [torch.nn.functional.gelu(row, approximate="tanh") for row in rows]
    assert not torch.equal(torch.stack(alone), whole)


def test_shape_strides_and_other_arguments_are_preserved() -> None:
    rows = torch.randn(4, 6, 10).transpose(0, 1)
    got = in_row_pieces(torch.nn.functional.gelu, rows, approximate="tanh")
    assert got.shape == rows.shape
    assert torch.allclose(got, torch.nn.functional.gelu(rows, approximate="tanh"), atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 100, 601])
def test_threads_get_whole_rows(num_rows: int, num_threads: int) -> None:
    rows = torch.randn(num_rows, 1000, generator=torch.Generator().manual_seed(0))
    row_counts = []  # of the calls

    def silu(piece: torch.Tensor) -> torch.Tensor:
        row_counts.append(piece.shape[0])
        return torch.nn.functional.silu(piece)

    usual_num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert in_row_pieces(silu, rows).shape == rows.shape
    finally:
        torch.set_num_threads(usual_num_threads)
    assert sum(row_counts) == num_rows
    padded_columns = 1024
    for row_count in row_counts:
        is_divided_evenly = row_count % num_threads == 0
        is_in_one_thread = row_count * padded_columns <= ELEMENTS_PER_CALL
        assert is_divided_evenly or is_in_one_thread
    assert len(row_counts) <= 4
