from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from radixkv.kernels import reference
from radixkv.kernels.gpu.norm import add_rms_norm, rms_norm, row_mean
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH, NormStyle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = [1, 37, 80, 128, 4096, 5000]
STYLES = [TORCH, LLAMA, GEMMA]


def make_inputs(num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator) for shape in ((num_rows, num_columns), (num_columns,)))
    return (rows + 0.5).to(device, dtype), weight.to(device, dtype)


def normalize_rows(rows: torch.Tensor) -> torch.Tensor:
    return rms_norm(rows, torch.linspace(-2, 2, rows.shape[-1], device=rows.device).to(rows.dtype), 1e-6)


def add_and_normalize_rows(rows: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-2, 2, rows.shape[-1], device=rows.device).to(rows.dtype)
    return torch.stack(add_rms_norm(rows, 0.3 * rows, weight, 1e-6, LLAMA))


FUNCTIONS = [row_mean, normalize_rows]


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_mean_is_the_mean(dtype: torch.dtype, num_columns: int, kernel_device: str) -> None:
    rows, _ = make_inputs(17, num_columns, dtype, kernel_device)
    got = row_mean(rows)
    assert (got.shape, got.dtype) == ((17, 1), dtype)
    exact = rows.double().mean(-1, keepdim=True)
    torch.testing.assert_close(got.double(), exact, rtol=0.5 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.25])
def test_matches_rms_norm(dtype: torch.dtype, num_columns: int, eps: float, kernel_device: str) -> None:
    rows, weight = make_inputs(5, num_columns, dtype, kernel_device)
    for given in (weight, None):
        got = rms_norm(rows, given, eps)
        assert (got.shape, got.dtype) == (rows.shape, dtype)
        scale = None if given is None else given.double()
        exact = functional.rms_norm(rows.double(), (num_columns,), scale, eps)
        torch.testing.assert_close(got.double(), exact, rtol=0.5 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)


def test_weight_may_be_wider_than_the_rows_and_strided(kernel_device: str) -> None:
    rows, _ = make_inputs(5, 37, torch.bfloat16, kernel_device)
    weight = torch.randn(74, device=kernel_device)[::2]
    exact = functional.rms_norm(rows.double(), (37,), weight.double(), 1e-6)
    torch.testing.assert_close(rms_norm(rows, weight, 1e-6).double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "num_columns"), [(torch.float16, 1), (torch.float32, 37), (torch.bfloat16, 128), (torch.bfloat16, 5000)]
)
@pytest.mark.parametrize("style", STYLES)
def test_each_style_rounds_as_its_models_do(
    style: NormStyle, dtype: torch.dtype, num_columns: int, kernel_device: str
) -> None:
    rows, weight = make_inputs(5, num_columns, dtype, kernel_device)
    tolerance = {"rtol": max(3e-6, 2 * torch.finfo(dtype).eps), "atol": 1e-7}
    expected = reference.rms_norm(rows, weight, 1e-6, style)
    got = rms_norm(rows, weight, 1e-6, style)
    torch.testing.assert_close(got, expected, **tolerance)
    if dtype != torch.float32:  # in half precision, rounding hides the summation order of all but a few elements
        assert (got != expected).float().mean() <= 0.02
    residual = rows.flip(0) * 3
    sums, normed = add_rms_norm(rows, residual, weight, 1e-6, style)
    assert torch.equal(sums, rows + residual)
    assert torch.equal(normed, rms_norm(sums, weight, 1e-6, style))
    torch.testing.assert_close(normed, reference.add_rms_norm(rows, residual, weight, 1e-6, style)[1], **tolerance)


def test_without_a_weight_all_styles_agree(kernel_device: str) -> None:
    rows, _ = make_inputs(5, 37, torch.bfloat16, kernel_device)
    expected = rms_norm(rows, None, 1e-6)
    assert all(torch.equal(rms_norm(rows, None, 1e-6, style), expected) for style in STYLES)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "num_columns"), [(torch.float32, 37), (torch.bfloat16, 128), (torch.float32, 5000)])
def test_a_row_does_not_depend_on_the_row_count_or_its_position(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, num_columns: int, kernel_device: str
) -> None:
    rows, _ = make_inputs(37, num_columns, dtype, kernel_device)
    whole = function(rows)
    for num_rows in (1, 2, 15, 16, 17, 36):
        assert torch.equal(function(rows[:num_rows]), whole[:num_rows])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    assert torch.equal(function(rows[order]), whole[order])
    assert torch.equal(function(rows[3:]), whole[3:])
    memory = torch.empty(rows.numel() + 1, dtype=dtype, device=kernel_device)
    assert torch.equal(function(memory[1:].view(rows.shape).copy_(rows)), whole)
    assert torch.equal(function(rows.t().contiguous().t()), whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # inf * 0, in the interpreter
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("num_columns", [37, 128])
def test_nan_stays_in_its_row(
    function: Callable[[torch.Tensor], torch.Tensor], num_columns: int, kernel_device: str
) -> None:
    rows, _ = make_inputs(9, num_columns, torch.float32, kernel_device)
    clean = function(rows)
    rows[[0, 4]] = float("nan")
    rows[8] = float("inf")
    got = function(rows)
    assert torch.equal(got[[1, 2, 3, 5, 6, 7]], clean[[1, 2, 3, 5, 6, 7]])
    assert got[[0, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_float32(dtype: torch.dtype, kernel_device: str) -> None:
    rows = torch.full((2, 4096), 300.0, dtype=dtype, device=kernel_device)  # in float16 sum and squares would overflow
    assert torch.equal(row_mean(rows), rows[:, :1])
    assert torch.equal(rms_norm(rows, None, 0.0), torch.ones_like(rows))
    large = 2 / torch.finfo(dtype).eps  # in this dtype, large + 1 is rounded to large
    steps = torch.tensor([large, 1.0, 1.0], dtype=dtype, device=kernel_device).repeat_interleave(4096)[None]
    assert torch.equal(row_mean(steps), steps.double().mean(-1, keepdim=True).to(dtype))


def test_leading_dimensions_are_preserved(kernel_device: str) -> None:
    rows, weight = make_inputs(24, 80, torch.bfloat16, kernel_device)
    assert torch.equal(row_mean(rows.view(2, 3, 4, 80)), row_mean(rows).view(2, 3, 4, 1))
    assert torch.equal(rms_norm(rows.view(2, 3, 4, 80), weight, 1e-6), rms_norm(rows, weight, 1e-6).view(2, 3, 4, 80))
    assert torch.equal(row_mean(rows[3]), row_mean(rows)[3])
    assert torch.equal(
        add_and_normalize_rows(rows.view(2, 3, 4, 80)), add_and_normalize_rows(rows).view(2, 2, 3, 4, 80)
    )
    assert torch.equal(add_and_normalize_rows(rows.t().contiguous().t()[3:]), add_and_normalize_rows(rows)[:, 3:])


def test_empty_inputs_give_empty_outputs(kernel_device: str) -> None:
    rows, weight = make_inputs(4, 80, torch.float32, kernel_device)
    assert row_mean(rows.view(2, 2, 80)[:, :0]).shape == (2, 0, 1)
    assert rms_norm(rows[:0], weight, 1e-6).shape == (0, 80)
    assert [each.shape for each in add_rms_norm(rows[:0], rows[:0], weight, 1e-6)] == [(0, 80), (0, 80)]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(5), r"weight: expected shape \(4,\) on cpu, got \(5,\) on cpu"),
        (torch.zeros(1, 4), r"weight: expected shape \(4,\) on cpu, got \(1, 4\) on cpu"),
        (torch.zeros(4, device="meta"), r"weight: expected shape \(4,\) on cpu, got \(4,\) on meta"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.zeros(2, 4), weight, 1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("rows", "message"),
    [(torch.zeros(2, 4, dtype=torch.int64), "got torch.int64"), (torch.zeros(2, 0), "at least one column")],
)
def test_tensors_without_rows_are_rejected(
    function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(rows)


@pytest.mark.parametrize(
    "residual", [torch.zeros(4), torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4, device="meta")]
)
def test_residuals_that_do_not_fit_are_refused(residual: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^residual: expected torch\.float32 \(2, 4\) on cpu, got "):
        add_rms_norm(torch.zeros(2, 4), residual, None, 1e-6)
