import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.hadamard import hadamard_transform
from radixkv.kernels.quantization import INT4, dequantize, quantize


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_bitwise_identical_to_the_reference(dtype: torch.dtype, head_dim: int, kernel_device: str) -> None:
    for num_tokens, num_heads in ((1, 1), (1, 3), (37, 2)):
        vectors = torch.randn(num_heads, num_tokens, head_dim, device=kernel_device).to(dtype).transpose(0, 1)
        for result_dtype in (dtype, torch.float32):
            expected = reference.hadamard_transform(vectors, result_dtype)
            assert torch.equal(hadamard_transform(vectors, result_dtype), expected)


def test_strided_vectors_are_refused(kernel_device: str) -> None:
    vectors = torch.zeros(3, 16, 2, device=kernel_device).transpose(1, 2)
    with pytest.raises(ValueError, match="expected a contiguous last dimension"):
        hadamard_transform(vectors, torch.float32)


@pytest.mark.parametrize("head_dim", [1, 48, 64, 100, 128])
def test_dot_products_are_preserved_and_the_transform_is_its_own_inverse(head_dim: int) -> None:
    first, second = torch.randn(2, 7, 3, head_dim, dtype=torch.float32).unbind(0)
    rotated = [reference.hadamard_transform(each, torch.float32) for each in (first, second)]
    torch.testing.assert_close((rotated[0] * rotated[1]).sum(-1), (first * second).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(reference.hadamard_transform(rotated[0], torch.float32), first, atol=1e-5, rtol=1e-5)


def test_the_bits_of_a_vector_do_not_depend_on_other_vectors() -> None:
    vectors = torch.randn(40, 5, 96)
    together = reference.hadamard_transform(vectors, torch.float32)
    for token in (0, 17, 39):
        assert torch.equal(reference.hadamard_transform(vectors[token : token + 1], torch.float32)[0], together[token])


def test_outliers_cost_the_other_elements_less_precision() -> None:
    vectors = torch.randn(256, 1, 128)
    vectors[..., 5] *= 16
    plain = dequantize(*quantize(vectors, INT4), INT4)
    rotated = dequantize(*quantize(reference.hadamard_transform(vectors, torch.float32), INT4), INT4)
    rotated_back = reference.hadamard_transform(rotated, torch.float32)
    assert (rotated_back - vectors).norm() < 0.7 * (plain - vectors).norm()


def test_non_finite_elements_stay_non_finite() -> None:
    vectors = torch.zeros(2, 1, 16)
    vectors[1, 0, 3] = torch.inf
    assert reference.hadamard_transform(vectors, torch.float32).isfinite().all(-1).tolist() == [[True], [False]]
