import pytest
import torch

from radixkv.kernels.quantization import LARGEST, dequantize, pack_int4, quantize, stored_dim, stored_dtype, unpack_int4

# Maximum rounding error, relative to the largest magnitude: half of the distance between neighbouring values. Integers
# go up to 127 and 7. float8_e4m3fn has 3 mantissa bits, so the distance is at most 1/8 of the value.
MAX_ERROR = {torch.float8_e4m3fn: 1 / 16, torch.int8: 1 / 254, torch.int4: 1 / 14}


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantization_errors_are_at_most_half_a_step(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    vectors = torch.randn(50, 3, 64).to(dtype)
    values, scales = quantize(vectors, kv_dtype)
    assert (values.shape, values.dtype) == ((50, 3, stored_dim(64, kv_dtype)), stored_dtype(kv_dtype))
    assert (scales.shape, scales.dtype) == ((50, 3), torch.float32)
    errors = (dequantize(values, scales, kv_dtype) - vectors.float()).abs()
    largest = vectors.float().abs().amax(dim=-1, keepdim=True)
    assert (errors <= largest * MAX_ERROR[kv_dtype] * 1.001).all()
    assert errors.max() > 0


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_the_largest_magnitude_is_kept_at_any_size(factor: float, kv_dtype: torch.dtype) -> None:
    vectors = factor * torch.randn(20, 32)
    back = dequantize(*quantize(vectors, kv_dtype), kv_dtype)
    torch.testing.assert_close(back.abs().amax(dim=-1), vectors.abs().amax(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("number", [0.0, 1e-44])
def test_zeros_and_tiny_values_are_dequantized_to_zeros(number: float, kv_dtype: torch.dtype) -> None:
    values, scales = quantize(torch.full((2, 8), number), kv_dtype)
    assert scales.isfinite().all()
    assert not dequantize(values, scales, kv_dtype).any()


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_with_a_non_finite_element_is_dequantized_to_nan(bad: float, kv_dtype: torch.dtype) -> None:
    vectors = torch.randn(3, 8)
    vectors[1, 5] = bad
    back = dequantize(*quantize(vectors, kv_dtype), kv_dtype)
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_quantization_of_a_vector_does_not_depend_on_other_vectors(head_dim: int, kv_dtype: torch.dtype) -> None:
    vectors = torch.randn(333, 2, head_dim)
    values, scales = quantize(vectors, kv_dtype)
    for rows in (slice(0, 1), slice(7, 24), slice(100, 333)):
        some_values, some_scales = quantize(vectors[rows], kv_dtype)
        assert torch.equal(some_values.view(torch.uint8), values[rows].view(torch.uint8))
        assert torch.equal(some_scales, scales[rows])
        back = dequantize(some_values, some_scales, kv_dtype, torch.bfloat16)
        assert torch.equal(back, dequantize(values, scales, kv_dtype, torch.bfloat16)[rows])


def test_pairs_of_int4_share_a_byte() -> None:
    values = torch.tensor([[1, -1, 7, -8]], dtype=torch.int8)
    packed = pack_int4(values)
    assert packed.view(torch.uint8).tolist() == [[0xF1, 0x87]]
    every_pair = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(unpack_int4(pack_int4(every_pair)), every_pair)


def test_other_dtypes_and_odd_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of float32, bfloat16, .*, int4, got int16"):
        stored_dtype(torch.int16)
    with pytest.raises(ValueError, match=r"expected one of torch\.float8_e4m3fn, .*, got torch\.float16"):
        quantize(torch.zeros(2, 8), torch.float16)
    with pytest.raises(ValueError, match="head_dim: expected an even number for int4, got 7"):
        stored_dim(7, torch.int4)
