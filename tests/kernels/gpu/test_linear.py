import importlib

import pytest
import torch
from torch.nn import functional

from radixkv.kernels.gpu.linear import LARGE_TILE, layout_of, linear, tile_shape, try_tiles

linear_module = importlib.import_module("radixkv.kernels.gpu.linear")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = torch.bfloat16
# (out_features, in_features): TMA with part of a tile left over, pointers with rows of 8 bytes, all smaller than a
# tile, and odd.
SHAPES = [(150, 136), (37, 100), (80, 96), (65, 15)]
# (dtype, in_features): by TMA, through pointers, without tensor cores.
WAYS = [(torch.bfloat16, 136), (torch.bfloat16, 100), (torch.float32, 100)]


def make_inputs(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, in_features), (out_features, in_features), (out_features,))
    rows, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return rows.to(device, dtype), (weight * in_features**-0.5).to(device, dtype), bias.to(device, dtype)


def assert_is_linear(
    got: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Assert that `got` is the exact result of the linear layer, rounded once, up to the error of float32 sums."""
    exact = functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert (got.shape, got.dtype) == (exact.shape, rows.dtype)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), exact, rtol=0.5 * torch.finfo(rows.dtype).eps, atol=2e-5)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_torch_linear(
    dtype: torch.dtype, out_features: int, in_features: int, is_transposed: bool, kernel_device: str
) -> None:
    rows, weight, bias = make_inputs(129, out_features, in_features, dtype, kernel_device)
    if is_transposed:
        weight = weight.t().contiguous().t()
    for num_rows in (1, 15, 17, 37, 129):
        assert_is_linear(linear(rows[:num_rows], weight, bias), rows[:num_rows], weight, bias)
    assert_is_linear(linear(rows[:17], weight), rows[:17], weight)


@pytest.mark.parametrize("in_features", [80, 36], ids=["TMA", "pointers"])
@pytest.mark.parametrize("out_features", [2050, 8200])
def test_wide_tiles_match_torch_linear(out_features: int, in_features: int, kernel_device: str) -> None:
    rows, weight, bias = make_inputs(37, out_features, in_features, HALF, kernel_device)
    assert_is_linear(linear(rows, weight, bias), rows, weight, bias)


def test_tiles_of_rows_may_fill_several_groups(kernel_device: str) -> None:
    rows, weight, bias = make_inputs(10 * 128 + 1, 130, 16, HALF, kernel_device)
    assert_is_linear(linear(rows, weight, bias), rows, weight, bias)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_a_row_does_not_depend_on_the_row_count(dtype: torch.dtype, in_features: int, kernel_device: str) -> None:
    rows, weight, bias = make_inputs(129, 37, in_features, dtype, kernel_device)
    whole = linear(rows, weight, bias)
    differing = [n for n in range(1, 129) if not torch.equal(linear(rows[:n], weight, bias), whole[:n])]
    assert differing == []


@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_a_row_does_not_depend_on_its_position(dtype: torch.dtype, in_features: int, kernel_device: str) -> None:
    rows, weight, bias = make_inputs(140, 70, in_features, dtype, kernel_device)
    whole = linear(rows, weight, bias)
    for seed in range(3):
        order = torch.randperm(140, generator=torch.Generator().manual_seed(seed)).to(kernel_device)
        assert torch.equal(linear(rows[order], weight, bias), whole[order])
    for first, end in ((1, 2), (3, 140), (65, 100), (127, 130)):
        assert torch.equal(linear(rows[first:end], weight, bias), whole[first:end])


@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_unaligned_views_give_the_same_bits(dtype: torch.dtype, in_features: int, kernel_device: str) -> None:
    rows, weight, bias = make_inputs(20, 37, in_features, dtype, kernel_device)
    whole = linear(rows, weight, bias)
    memory = torch.empty(rows.numel() + 1, dtype=dtype, device=kernel_device)
    shifted = memory[1:].view(rows.shape).copy_(rows)
    assert shifted.data_ptr() % 16 != 0
    assert torch.equal(linear(shifted, weight, bias), whole)
    assert torch.equal(linear(rows.t().contiguous().t(), weight, bias), whole)


@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_the_number_of_programs_does_not_change_a_bit(
    dtype: torch.dtype, in_features: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weight, bias = make_inputs(130, 150, in_features, dtype, kernel_device)
    whole = linear(rows, weight, bias)
    for num_multiprocessors in (1, 2, 5, 132):
        monkeypatch.setattr(linear_module, "_num_multiprocessors", lambda device, n=num_multiprocessors: n)
        assert torch.equal(linear(rows, weight, bias), whole)


@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype, in_features: int, kernel_device: str) -> None:
    rows, weight, bias = make_inputs(20, 37, in_features, dtype, kernel_device)
    clean = linear(rows, weight, bias)
    rows[[5, 19]] = float("nan")  # row 5 follows row 4 in memory, where the features of row 4 are padded to a tile
    weight[[0, 36]] = float("nan")
    got = linear(rows, weight, bias)
    is_clean = torch.ones_like(got, dtype=torch.bool)
    is_clean[[5, 19]] = is_clean[:, [0, 36]] = False
    assert torch.equal(got[is_clean], clean[is_clean])
    assert got[~is_clean].isnan().all()


def test_leading_dimensions_are_preserved(kernel_device: str) -> None:
    rows, weight, bias = make_inputs(24, 37, 96, HALF, kernel_device)
    flat = linear(rows, weight, bias)
    assert torch.equal(linear(rows.view(2, 3, 4, 96), weight, bias), flat.view(2, 3, 4, 37))
    assert torch.equal(linear(rows[3], weight, bias), flat[3])


def test_a_single_row_may_have_any_stride(kernel_device: str) -> None:
    rows, weight, bias = make_inputs(1, 37, 96, HALF, kernel_device)
    column = rows.as_strided((1, 96), (1, 1))
    assert column.is_contiguous()
    assert torch.equal(linear(column, weight, bias), linear(rows, weight, bias))


def test_strided_weight_and_bias_give_the_same_result(kernel_device: str) -> None:
    rows, weight, bias = make_inputs(17, 37, 96, HALF, kernel_device)
    assert_is_linear(linear(rows, weight[::2], bias[::2]), rows, weight[::2], bias[::2])
    assert_is_linear(linear(rows[:, ::2], weight[:, ::2], bias), rows[:, ::2], weight[:, ::2], bias)


def test_empty_inputs_give_empty_outputs(kernel_device: str) -> None:
    rows, weight, bias = make_inputs(4, 37, 96, HALF, kernel_device)
    assert linear(rows[:0], weight, bias).shape == (0, 37)
    assert linear(rows.view(2, 2, 96)[:, :0], weight, bias).shape == (2, 0, 37)
    assert linear(rows, weight[:0]).shape == (4, 0)


def test_the_weight_decides_how_tiles_are_loaded() -> None:
    weight = torch.empty(64, 96, dtype=HALF)
    assert layout_of(weight) == "in"
    assert layout_of(weight[3:]) == "in"
    assert layout_of(weight[:, :48]) == "in"
    assert layout_of(weight.t()) == "out"
    assert layout_of(weight.t()[:20]) == "out"


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(64, 96),
        torch.empty(64, 100, dtype=HALF),
        torch.empty(96, 100, dtype=HALF).t(),
        torch.empty(64, 200, dtype=HALF)[:, ::2],
        torch.empty(64, 104, dtype=HALF)[:, 4:100],
        torch.empty(96, dtype=HALF).expand(64, 96),
    ],
    ids=["float32", "rows of 200 bytes", "columns of 200 bytes", "strides both ways", "starts at byte 8", "expanded"],
)
def test_weights_that_tma_can_not_load_are_loaded_through_pointers(weight: torch.Tensor) -> None:
    assert layout_of(weight) is None


def test_large_weights_get_wide_tiles() -> None:
    columns = {n: tile_shape(n, HALF, "in").columns for n in (1, 2047, 2048, 8191, 8192, 14336, 16384, 152064)}
    assert columns == {1: 32, 2047: 32, 2048: 64, 8191: 64, 8192: 128, 14336: 128, 16384: 256, 152064: 256}


def test_weights_of_usual_models_are_read_by_half_of_the_multiprocessors() -> None:
    for out_features in (4096, 5120, 8192, 14336, 28672, 152064):
        assert out_features / tile_shape(out_features, HALF, "in").columns >= 132 / 2 - 2


def test_large_weights_without_tma_get_wide_tiles() -> None:
    assert {tile_shape(n, HALF, None).columns for n in (2048, 8192, 152064)} == {128}
    assert {tile_shape(n, torch.float32, None).columns for n in (1, 4096, 152064)} == {64}


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(3, 5), None, r"weight: expected shape \(3, 4\) in torch.float32 on cpu, got \(3, 5\) in"),
        (torch.zeros(4), None, r"weight: expected shape .* got \(4,\) in"),
        (torch.zeros(()), None, r"weight: expected shape .* got \(\) in"),
        (torch.zeros(3, 4, 1), None, r"weight: expected shape .* got \(3, 4, 1\) in"),
        (torch.zeros(3, 4, dtype=HALF), None, r"weight: expected .* got \(3, 4\) in torch.bfloat16 on cpu"),
        (torch.zeros(3, 4, device="meta"), None, r"weight: expected .* got \(3, 4\) in torch.float32 on meta"),
        (torch.zeros(3, 4), torch.zeros(4), r"bias: expected shape \(3,\) in torch.float32 on cpu, got \(4,\) in"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=HALF), r"bias: expected .* got \(3,\) in torch.bfloat16 on cpu"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(weight: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(torch.zeros(2, 4), weight, bias)


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows: expected float32, bfloat16 or float16, got torch.int64"):
        linear(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 4))


@pytest.mark.parametrize(("dtype", "in_features"), WAYS)
def test_the_check_distinguishes_batch_invariant_results(
    dtype: torch.dtype, in_features: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, weight, bias = make_inputs(1, 37, in_features, dtype, kernel_device)
    expected = "both sizes" if layout_of(weight) else "one size"
    assert try_tiles(weight, bias) == expected
    assert try_tiles(weight) == expected
    launch = linear_module._launch

    def launch_by_halves(rows, weight, bias, output, layout, shape):
        """Add up the features in two halves if there is a single row."""
        middle = in_features // 2 if rows.shape[0] == 1 else in_features
        launch(rows[:, :middle].contiguous(), weight[:, :middle].contiguous(), bias, output, None, shape)
        if middle < in_features:
            second_half = torch.empty_like(output)
            launch(rows[:, middle:].contiguous(), weight[:, middle:].contiguous(), None, second_half, None, shape)
            output += second_half

    monkeypatch.setattr(linear_module, "_launch", launch_by_halves)
    assert try_tiles(weight, bias) is None


def test_large_tiles_with_different_bits_are_not_used(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, bias = make_inputs(1, 37, 64, HALF, kernel_device)
    launch = linear_module._launch

    def launch_with_errors_in_large_tiles(rows, weight, bias, output, layout, shape):
        launch(rows, weight, bias, output, layout, shape)
        if shape == LARGE_TILE:
            output[0, 0] += 1

    monkeypatch.setattr(linear_module, "_launch", launch_with_errors_in_large_tiles)
    assert try_tiles(weight, bias) == "one size"


@pytest.mark.parametrize(("num_rows", "is_large"), [(1, False), (1024, False), (2048, True)])
def test_large_tiles_are_used_if_they_fill_the_device(
    num_rows: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    monkeypatch.setattr(linear_module, "_num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(linear_module, "_launch", lambda *inputs: shapes.append(inputs[-1]))
    rows, weight = torch.empty(num_rows, 64, dtype=HALF), torch.empty(4096, 64, dtype=HALF)
    linear(rows, weight, has_large_tiles=True)
    linear(rows, weight)
    usual = tile_shape(4096, HALF, "in")
    assert shapes == [LARGE_TILE if is_large else usual, usual]
