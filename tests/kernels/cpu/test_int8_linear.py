import pytest
import torch

from radixkv.kernels.cpu import int8_linear as int8_module
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly, int8_linear, pack_int8, quantize_rows
from tests.processor import needs_exact_int8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_exact_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_matches_a_linear_layer_of_quantized_values(dtype: torch.dtype, *, has_bias: bool) -> None:
    rows, weight = random(33, 96).to(dtype), (random(40, 96) / 10).to(dtype)
    bias = random(40).to(dtype) if has_bias else None
    summand = 0 if bias is None else bias
    got = int8_linear(rows, pack_int8(weight), bias)
    (row_integers, row_scales), (weight_integers, weight_scales) = quantize_rows(rows), quantize_rows(weight)
    expected = (row_integers.double() * row_scales) @ (weight_integers.double() * weight_scales).t() + summand
    assert (got.shape, got.dtype) == (expected.shape, dtype)
    assert (got - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    unquantized = rows.double() @ weight.double().t() + summand
    assert (got - unquantized).norm() <= 0.02 * unquantized.norm()


def test_a_row_is_quantized_to_255_levels() -> None:
    rows = random(50, 300) * torch.logspace(-6, 6, 50)[:, None]
    integers, scales = quantize_rows(rows)
    assert integers.abs().amax(1).tolist() == [127] * 50
    assert ((integers * scales - rows).abs() <= 0.5001 * scales).all()


def test_zeros_and_non_finite_values_are_preserved() -> None:
    rows = random(4, 64)
    rows[0], rows[1, 3], rows[2, 5] = 0, torch.inf, torch.nan
    product = int8_linear(rows, pack_int8(random(8, 64)), None)
    assert torch.equal(product[0], torch.zeros(8))
    assert not product[1].isfinite().any()
    assert not product[2].isfinite().any()
    assert product[3].isfinite().all()


@needs_exact_int8
def test_a_row_does_not_depend_on_the_row_count() -> None:
    rows, packed = random(600, 100), pack_int8(random(37, 100))
    whole = int8_linear(rows, packed, None)
    for start, end in ((0, 1), (1, 4), (4, 20), (20, 53), (53, 600)):
        assert torch.equal(int8_linear(rows[start:end].clone(), packed, None), whole[start:end])


def test_saturating_accumulation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_matmul = int8_module._int8_matmul

    def saturating_matmul(integers: torch.Tensor, weight: int8_module.Int8Weight) -> torch.Tensor:
        limit = 32_767 * weight.scales  # the largest int16
        return exact_matmul(integers, weight).clamp(-limit, limit)

    monkeypatch.setattr(int8_module, "_int8_matmul", saturating_matmul)
    assert not adds_integers_exactly()


def test_sums_that_could_overflow_are_rejected() -> None:
    with pytest.raises(ValueError, match="at most 133144 input features"):
        pack_int8(torch.zeros(1, 133_145))
