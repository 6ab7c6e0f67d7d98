import pytest
import torch

from radixkv.kernels.cpu.row_norm import row_norm
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH, NormStyle

EPS = 1e-5


def rms_norm_in_float64(rows: torch.Tensor, weight: torch.Tensor, style: NormStyle) -> torch.Tensor:
    wide = rows.double()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    if style.rounds_first:
        return normed.to(rows.dtype).double() * weight.double()
    return normed * (weight.double() + style.weight_offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", [TORCH, LLAMA, GEMMA])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
def test_matches_rms_norm(style: NormStyle, dtype: torch.dtype, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (magnitude * torch.randn(2, 17, 100, generator=generator)).to(dtype)
    weight = torch.randn(100, generator=generator).to(dtype)
    rows_before = rows.clone()
    prepared_weight = weight if style.rounds_first else weight.float() + style.weight_offset
    got = row_norm(rows, prepared_weight, torch.tensor([EPS]), style)
    expected = rms_norm_in_float64(rows, weight, style)
    assert (got.shape, got.dtype) == (rows.shape, dtype)
    assert (got - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert torch.equal(rows, rows_before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [8, 33, 64, 96, 896])
def test_a_row_has_the_same_bits_in_any_batch_of_two_or_more_rows(num_columns: int, dtype: torch.dtype) -> None:
    rows = torch.randn(600, num_columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight, eps = torch.ones(num_columns, dtype=dtype), torch.tensor([EPS])
    whole = row_norm(rows, weight, eps, LLAMA)
    for start, end in ((0, 2), (5, 7), (9, 12), (0, 16), (3, 35), (100, 308), (9, 521)):
        assert torch.equal(row_norm(rows[start:end].clone(), weight, eps, LLAMA), whole[start:end])
    heads = row_norm(rows.view(150, 4, num_columns), weight, eps, LLAMA)
    assert torch.equal(heads.view(600, num_columns), whole)
    assert torch.equal(row_norm(rows.view(150, 4, num_columns)[:, 1:3], weight, eps, LLAMA), heads[:, 1:3])
