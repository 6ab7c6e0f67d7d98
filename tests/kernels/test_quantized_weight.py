import pytest
import torch

from radixkv.kernels.quantized_weight import GROUP_FEATURES, QuantizedWeight


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().view(len(weight), -1, GROUP_FEATURES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_at_most_half_a_step_in_8_bits_and_small_on_average(bits: int, dtype: torch.dtype) -> None:
    weight = random(50, 96, dtype=dtype)
    quantized = QuantizedWeight.quantize(weight, bits)
    assert (quantized.codes.shape, quantized.scales.shape) == (weight.shape, (50, 3))
    assert quantized.scales.dtype == torch.float16
    if bits == 8:
        step, max_steps = groups(weight).abs().amax(-1) / 127, 0.51
    else:  # the fitted range may leave out the smallest and the largest weight, which reduces the mean error
        step, max_steps = (groups(weight).amax(-1) - groups(weight).amin(-1)) / 15, 1.6
    errors = groups(quantized.dequantize()) - groups(weight)
    assert (errors.abs() <= max_steps * step[..., None]).all()
    assert (errors.square().mean(-1).sqrt() <= 0.4 * step).all()


def test_weights_that_4_bits_can_express_are_kept() -> None:
    codes = torch.randint(0, 16, (40, 3, GROUP_FEATURES), generator=torch.Generator().manual_seed(0))
    codes[..., 0], codes[..., 1] = 0, 15
    scales, minima = random(40, 3).abs().half().float(), random(40, 3).half().float()
    weight = (codes * scales[..., None] + minima[..., None]).view(40, 96)
    restored = QuantizedWeight.quantize(weight, 4).dequantize()
    assert (restored - weight).abs().max() <= 2**-9 * weight.abs().max()


def test_fitting_reduces_the_error_of_a_range() -> None:
    weight = random(200, 320)
    low, high = groups(weight).aminmax(dim=-1, keepdim=True)
    codes = ((groups(weight) - low) * (15 / (high - low))).round()
    unfitted = (codes * (high - low) / 15 + low - groups(weight)).square().mean()
    fitted = (QuantizedWeight.quantize(weight, 4).dequantize() - weight).square().mean()
    assert fitted < 0.95 * unfitted


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("number", [0.0, 1.5, -1e-3])
def test_groups_of_one_number_are_kept(bits: int, number: float) -> None:
    weight = torch.full((3, 64), number)
    restored = QuantizedWeight.quantize(weight, bits).dequantize()
    assert (restored - weight).abs().max() <= 1e-3 * abs(number)


def test_a_large_weight_is_quantized_as_its_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(20, 64)
    whole = QuantizedWeight.quantize(weight, 4)
    monkeypatch.setattr("radixkv.kernels.quantized_weight._CHUNK_NUMBERS", 200)
    assert torch.equal(QuantizedWeight.quantize(weight, 4).dequantize(), whole.dequantize())
    parts = QuantizedWeight.concatenated(QuantizedWeight.quantize(each, 4) for each in weight.split([3, 17]))
    assert torch.equal(parts.dequantize(), whole.dequantize())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 33), "expected a multiple of 32 input features, got 33"),
        (torch.full((4, 32), 1e30), "expected groups with scales of at most 65504, got inf"),
        (torch.full((4, 32), torch.nan), "expected groups with scales of at most 65504, got nan"),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_without_this_format_are_refused(bits: int, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.quantize(weight, bits)
