"""GEMMs in C++ are correct up to rounding, and the bits of a row do not depend on other rows."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn.functional import linear, silu

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.kernels.cpu.gemm_backends import gemm_backends
from radixkv.kernels.native import gemm
from radixkv.kernels.native.library import load_library, runnable_variants
from radixkv.kernels.native.variants import VARIANTS
from radixkv.kernels.quantized_weight import QuantizedWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (out_features, in_features): less than a vector and a panel, whole vectors and panels, more words than a cache holds
# at once, and panels that remain when several others are read together. The last two fill tiles.
SHAPES = [(1, 2), (31, 34), (64, 16), (33, 1000), (96, 4866), (113, 50), (31, 32), (65, 2080)]
# Row counts: less than a tile, tiles of different sizes, and more rows than are packed at a time. With up to 4 rows, or
# with AMX up to 32, a quantized weight is multiplied while it is dequantized.
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 33, 100, 258, 259, 516, 517, 1033]
# The error of one rounding, relative to the sum of the magnitudes of the terms.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def in_use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_library", None)  # restored after the test
    gemm.use(library)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def require_batch_invariance(rows: torch.Tensor, panels: gemm.Panels, bias: torch.Tensor, whole: torch.Tensor) -> None:
    """Assert that results for the first and the last rows alone are the same rows of `whole`, the result for all."""
    for num_rows in ROWS:
        for part in (slice(num_rows), slice(-num_rows, None)):
            assert torch.equal(gemm.multiply(rows[part].contiguous(), panels, bias), whole[part])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_correct_and_batch_invariant(
    dtype: torch.dtype, shape: tuple[int, int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = numbers(*shape, dtype=dtype), numbers(shape[0], dtype=dtype)
    rows, panels = numbers(ROWS[-1], shape[1], dtype=dtype), gemm.Panels(weight)
    whole = gemm.multiply(rows, panels, bias)
    assert (whole.shape, whole.dtype) == ((ROWS[-1], shape[0]), dtype)
    wide_rows, wide_weight, wide_bias = (each.double() for each in (rows, weight, bias))
    bound = TOLERANCE[dtype] * (wide_rows.abs() @ wide_weight.abs().t() + wide_bias.abs())
    assert ((whole.double() - (wide_rows @ wide_weight.t() + wide_bias)).abs() <= bound).all()
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    require_batch_invariance(rows, panels, bias, whole)
    without_bias = gemm.multiply(rows, panels, None).double()
    assert ((without_bias - wide_rows @ wide_weight.t()).abs() <= bound).all()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 32), (31, 64), (96, 4896), (113, 96), (65, 2080)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_weights_give_the_bits_of_dequantized_ones(
    dtype: torch.dtype, bits: int, shape: tuple[int, int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the processor multiplies pairs of bfloat16, dequantized weights are rounded to bfloat16, ties away from 0."""
    quantized = QuantizedWeight.quantize(numbers(*shape, dtype=torch.float32), bits)
    panels, bias = gemm.QuantizedPanels([quantized], dtype), numbers(shape[0], dtype=dtype)
    rows, weight = numbers(ROWS[-1], shape[1], dtype=dtype), quantized.dequantize()
    whole = gemm.multiply(rows, panels, bias)
    multiplies_pairs = gemm._current_library().word_numbers[dtype] == 2
    if multiplies_pairs:
        weight = ((weight.view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
    if multiplies_pairs or dtype == torch.float32:
        assert torch.equal(gemm.multiply(rows, gemm.Panels(weight.to(dtype)), bias), whole)
    wide_rows, wide_weight, wide_bias = (each.double() for each in (rows, weight, bias))
    bound = TOLERANCE[dtype] * (wide_rows.abs() @ wide_weight.abs().t() + wide_bias.abs())
    assert ((whole.double() - (wide_rows @ wide_weight.t() + wide_bias)).abs() <= bound).all()
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    require_batch_invariance(rows, panels, bias, whole)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_weights_are_packed_together_and_gate(dtype: torch.dtype, bits: int) -> None:
    weights = [QuantizedWeight.quantize(numbers(size, 64, dtype=torch.float32), bits) for size in (7, 70, 33)]
    for num_rows in (1, 40):
        rows = numbers(num_rows, 64, dtype=dtype)
        alone = [gemm.multiply(rows, gemm.QuantizedPanels([each], dtype), None) for each in weights]
        assert torch.equal(gemm.multiply(rows, gemm.QuantizedPanels(weights, dtype), None), torch.cat(alone, 1))
        up = gemm.QuantizedPanels([weights[1]], dtype)
        gated = gemm.gate(rows, up, None, up, None).double()
        expected = silu(alone[1].double()) * alone[1].double()
        assert (gated - expected).norm() <= 4 * TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_a_packed_weight_are_what_was_packed(bits: int) -> None:
    weight = QuantizedWeight.quantize(numbers(70, 96, dtype=torch.float32), bits)
    features = torch.tensor([0, 69, 7, 31, 32, 7])
    got = gemm.QuantizedPanels([weight], torch.float32).rows(features)
    expected = weight.rows(features)
    assert (got.codes.dtype, got.bits) == (expected.codes.dtype, bits)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.dequantize(), expected.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_may_be_packed_together(dtype: torch.dtype) -> None:
    """Each of them may end anywhere in a panel, and may be some columns of a larger matrix."""
    rows, wide = numbers(3, 40, dtype=dtype), numbers(200, 60, dtype=dtype)[:, 4:44]
    for sizes in ((16, 32), (7, 5, 3), (1, 63, 70), (33, 31, 64), (40, 100, 60)):
        weights = wide[: sum(sizes)].split(sizes)
        whole = gemm.multiply(rows, gemm.Panels(wide[: sum(sizes)].contiguous()), None)
        assert torch.equal(gemm.multiply(rows, gemm.Panels(*weights), None), whole)


@pytest.mark.parametrize(("in_features", "num_rows"), [(130, 30), (64, 30), (2080, 520)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_is_silu_of_one_matmul_times_the_other(dtype: torch.dtype, in_features: int, num_rows: int) -> None:
    weight = numbers(200, in_features, dtype=dtype) * in_features**-0.5
    up = -weight.flip(0)
    bias, up_bias = (numbers(200, dtype=dtype) * sign for sign in (1, -1))
    rows = numbers(num_rows, in_features, dtype=dtype)
    panels, up_panels = gemm.Panels(weight), gemm.Panels(up)

    def exact_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(rows.double(), weight.double(), None if bias is None else bias.double())

    for gate_bias_or_none, up_bias_or_none in ((None, None), (bias, None), (None, up_bias), (bias, up_bias)):
        got = gemm.gate(rows, panels, gate_bias_or_none, up_panels, up_bias_or_none)
        expected = silu(exact_linear(weight, gate_bias_or_none)) * exact_linear(up, up_bias_or_none)
        assert ((got.double() - expected).abs() <= 2 * TOLERANCE[dtype] * expected.abs() + 1e-4).all()
        assert got.dtype == dtype
        for num_last_rows in (1, 2, 13):
            last_rows = rows[-num_last_rows:].contiguous()
            gated = gemm.gate(last_rows, panels, gate_bias_or_none, up_panels, up_bias_or_none)
            assert torch.equal(gated, got[-num_last_rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_stay_in_their_row(dtype: torch.dtype) -> None:
    rows, panels = numbers(14, 64, dtype=dtype), gemm.Panels(numbers(50, 64, dtype=dtype))
    expected = gemm.multiply(rows, panels, None)
    rows[3, 7], rows[12, 39] = float("nan"), float("inf")
    got = gemm.multiply(rows, panels, None)
    others = [row for row in range(14) if row not in (3, 12)]
    assert torch.equal(got[others], expected[others])
    assert got[3].isnan().all()
    assert not got[12].isfinite().any()


@pytest.mark.skipif("amx" not in [each.name for each in runnable_variants()], reason="this processor has no AMX")
def test_amx_tiles_are_used_for_full_tiles() -> None:
    """AMX adds up in another order than AVX-512, which changes the results for inputs whose sums cancel."""
    results: dict[tuple[str, int], torch.Tensor] = {}
    for variant in VARIANTS[:2]:
        gemm.use(load_library(cache_directory(), variants=[variant]))
        for in_features in (1024, 1026):
            rows, weight, _ = sensitive_linear(torch.empty(50, in_features, dtype=torch.bfloat16), None, 20)
            results[variant.name, in_features] = gemm.multiply(rows, gemm.Panels(weight), None)
    assert not torch.equal(results["amx", 1024], results["avx512_bf16", 1024])
    assert torch.equal(results["amx", 1026], results["avx512_bf16", 1026]), "1026 features do not fill tiles"


def test_a_gate_of_large_numbers_is_finite() -> None:
    """SiLU of -200 is -0 and of 200 is 200, where the exponential alone is not finite."""
    weight = torch.tensor([[200.0], [-200.0]])
    got = gemm.gate(torch.ones(1, 1), gemm.Panels(weight), None, gemm.Panels(torch.ones(2, 1)), None)
    torch.testing.assert_close(got, torch.tensor([[200.0, 0.0]]))


def test_unsupported_weights_are_left_to_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("native" in gemm_backends(torch.empty(4, 4, dtype=dtype)) for dtype in DTYPES)
    assert "native" not in gemm_backends(torch.empty(4, 4, dtype=torch.float64))
    in_use = gemm._library
    assert in_use is not None
    monkeypatch.setattr(gemm, "_library", in_use._replace(word_numbers={torch.bfloat16: 2}))
    assert "native" in gemm_backends(torch.empty(4, 4, dtype=torch.bfloat16))
    assert "native" not in gemm_backends(
        torch.empty(4, 3, dtype=torch.bfloat16)
    )  # three features do not fill words of two


def test_without_the_library_there_is_no_gemm_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_library", None)
    assert "native" not in gemm_backends(torch.empty(4, 4))
