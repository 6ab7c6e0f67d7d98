import pytest
import torch

from radixkv.kernels import row_tiles
from radixkv.kernels.row_tiles import SIZES, agreeing_sizes, tiled_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def make(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, 100), (37, 100), (37,))
    rows, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weight * 0.1, bias


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 48, 513, 1100])
def test_it_is_a_linear_layer(num_rows: int, dtype: torch.dtype) -> None:
    rows, weight, bias = make(num_rows, dtype)
    for given in (bias, None):
        got = tiled_linear(rows, weight, given, SIZES)
        expected = torch.nn.functional.linear(rows, weight, given)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert (got - expected).abs().max() <= TOLERANCE[dtype]


def test_leading_dimensions_stay() -> None:
    rows, weight, bias = make(24, torch.float32)
    got = tiled_linear(rows.view(2, 3, 4, 100), weight, bias, SIZES)
    assert torch.equal(got.view(24, 37), tiled_linear(rows, weight, bias, SIZES))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_has_the_same_bits_however_many_there_are(dtype: torch.dtype, *, transposed: bool) -> None:
    rows, weight, bias = make(1100, dtype)
    if transposed:
        weight = weight.t().contiguous().t()
    sizes = agreeing_sizes(weight, bias)
    whole = tiled_linear(rows, weight, bias, sizes)
    for start, end in ((0, 1), (1, 4), (4, 20), (20, 53), (53, 600), (599, 600), (600, 1100)):
        assert torch.equal(tiled_linear(rows[start:end], weight, bias, sizes), whole[start:end])
    order = torch.randperm(1100)
    assert torch.equal(tiled_linear(rows[order], weight, bias, sizes), whole[order])


@pytest.mark.parametrize(
    ("bad_rows", "expected"), [(64, tuple(size for size in SIZES if size != 64)), (16, ()), (3, SIZES)]
)
def test_sizes_that_compute_otherwise_are_left_out(
    bad_rows: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = torch.mm

    def mm(rows: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        product(rows, weight, out=out)
        if rows.shape[0] == bad_rows:
            out[0] += 1e-3  # the place in the tile matters
        return out

    monkeypatch.setattr(row_tiles.torch, "mm", mm)
    assert agreeing_sizes(make(1, torch.float32)[1]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_sums_is_seen_through_any_rounding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router of a mixture of experts in bfloat16, 64 features to 4, gave one row in a million other bits."""

    def mm(rows: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        terms = list((rows.float().t()[:, :, None] * weight.float()[:, None]).unbind())  # in_features of them
        return out.copy_(sum(terms[::-1] if rows.shape[0] == 32 else terms))

    monkeypatch.setattr(row_tiles.torch, "mm", mm)
    assert agreeing_sizes(torch.empty(4, 64, dtype=dtype), sizes=(64, 32, 16)) == (64, 16)
